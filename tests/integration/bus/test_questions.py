"""Questions as foreign clients ask them: without a reply, and too many."""

import asyncio
import json
import logging

import nats as nats_client
import pytest

from everstep import subjects
from everstep.bus import connect, requests
from everstep.bus.auth.login import Login
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.server.dev_server import DevServer
from everstep.messages import Done, Message, ShowRound, encode
from tests.waiting import WITHIN_S, until_async


async def test_questions_without_a_reply_are_dropped_and_too_many_refused(
    nats: DevServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(requests, "_OPEN_MOST", 2)
    caplog.set_level(logging.WARNING, "everstep.bus.requests")
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slowly(_: Message) -> Message:
        begun.set()
        await may_end.wait()
        return Done(text="at last")

    question, subject = encode(ShowRound(job="j")), subjects.ask("rendezvous", "show", "j")
    login = Login(nats.settings(ADMIN))
    raw = await nats_client.connect(**await asyncio.to_thread(login.options))
    try:
        async with (
            connect(nats.settings(SERVICE), "answering") as bus,
            bus.answer("rendezvous", {"show": slowly}),
        ):
            answers = []

            async def ask() -> None:
                reply = await raw.request(subject, question, timeout=WITHIN_S)
                answers.append((reply.headers or {}).get("Nats-Service-Error-Code", "200"))

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ask())
                await begun.wait()
                for _ in range(3):  # one is answered, and the others are too many
                    tasks.create_task(ask())
                    await raw.publish(subject, question)
                await until_async(lambda: answers.count("503") == 2, "two were refused")
                may_end.set()
            assert sorted(answers) == ["200", "200", "503", "503"]
            counted = json.loads((await raw.request("$SRV.STATS.rendezvous")).data)
            assert counted["endpoints"][0]["num_requests"] == len(answers) + 3
            assert caplog.text.count("question_dropped") == 1
    finally:
        await raw.close()
