"""Questions without a reply, too many, and before the connection is open."""

import asyncio
import json
import logging

import nats as nats_client
import pytest
from nats.aio.client import Client

from everstep import subjects
from everstep.bus import connect, requests
from everstep.bus.auth.login import Login
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.connection import Connection
from everstep.bus.errors import NobodyAnswersError
from everstep.bus.nats_patches import PatchedClient, settle
from everstep.bus.server.dev_server import DevServer
from everstep.messages import Done, Message, ShowRound, encode
from tests.waiting import WITHIN_S, turns, until_async


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


async def test_a_question_that_arrives_while_a_service_opens_its_connection_is_answered(
    nats: DevServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has subscribed, and cannot send anything yet."""
    settings = nats.settings(SERVICE)
    question, subject = ShowRound(job="j"), subjects.ask("rendezvous", "show", None)
    refuse_if_denied = Connection.refuse_if_denied

    async def show(_: Message) -> Message:
        assert service.connected, "a handler may need the bus"
        return Done(text="shown")

    async with connect(settings, "asking") as asking, asyncio.TaskGroup() as tasks:
        asked: list[asyncio.Task[Done]] = []

        async def ask_now(connection: Connection, client: Client, subscribed: str) -> None:
            await refuse_if_denied(connection, client, subscribed)
            if subscribed == subject and not asked:
                answer = asking.ask(
                    "rendezvous", "show", question, Done, job="j", within_s=WITHIN_S / 4
                )
                asked.append(tasks.create_task(answer))
                await turns()
                await settle(asking._connection.client, WITHIN_S)
                await settle(client, WITHIN_S)  # the service has read the question
                await turns(10)

        monkeypatch.setattr(Connection, "refuse_if_denied", ask_now)
        async with (
            connect(settings, "answering", wait=False) as service,
            service.answer("rendezvous", {"show": show}),
        ):
            await until_async(lambda: asked, "the service has subscribed")
            assert (await asked[0]).text == "shown"


async def test_a_question_to_a_service_that_logs_in_anew_is_not_lost(
    nats: DevServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the service reads no more: the asker hears at once that nobody answers."""
    settings, question = nats.settings(SERVICE), ShowRound(job="j")
    move = PatchedClient.move

    async def show(_: Message) -> Message:
        return Done(text="shown")

    async with (
        connect(settings, "asking") as asking,
        connect(settings, "answering") as service,
        service.answer("rendezvous", {"show": show}),
        asyncio.TaskGroup() as tasks,
    ):

        async def ask() -> Done:
            return await asking.ask(
                "rendezvous", "show", question, Done, job="j", within_s=WITHIN_S / 4
            )

        async def refused() -> None:
            with pytest.raises(NobodyAnswersError):
                await ask()

        async def ask_and_move(client: PatchedClient, to: str | None) -> None:
            client._transport._io_writer.transport.pause_reading()  # type: ignore[union-attr]
            asked.append(tasks.create_task(refused()))
            await turns()
            await settle(asking._connection.client, WITHIN_S)
            await move(client, to)

        asked: list[asyncio.Task[None]] = []
        monkeypatch.setattr(PatchedClient, "move", ask_and_move)
        assert (await ask()).text == "shown"
        await service._connection.log_in_anew()
        await asked[0]
        answer = await until_async(ask, "it answers again", despite=NobodyAnswersError)
        assert answer.text == "shown"
