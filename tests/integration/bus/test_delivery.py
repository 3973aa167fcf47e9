"""`deliver` on the real server: killed listeners, cut connections, and who may answer."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import not_

import msgspec
import pytest

from everstep import ids, subjects
from everstep.bus import BusSettings, connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusDeniedError, BusTimeoutError, BusUnreachableError
from everstep.bus.server.dev_server import DevServer
from everstep.messages import StandBy
from tests.integration.bus.servers import stopped
from tests.waiting import until_async

LISTENER = """
import asyncio, sys
from pathlib import Path
from everstep import subjects
from everstep.bus import BusSettings, connect
from everstep.messages import StandBy

async def main():
    url, login, job = sys.argv[1:]
    settings = BusSettings(url=url, credentials_file=Path(login))
    async with connect(settings, "listener") as bus:
        async with bus.subscribe(subjects.order(job, "n1"), StandBy):
            print("listening", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


def order(job: str) -> StandBy:
    return StandBy(id=ids.new_id(), job=job, round=1, reason="test")


@asynccontextmanager
async def listener(settings: BusSettings, job: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", LISTENER, settings.url, str(settings.credentials_file), job],
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"listening\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_listener_is_known_to_be_gone_at_once(
    shared_nats: DevServer, job: str
) -> None:
    settings = shared_nats.settings(SERVICE)
    subject = subjects.order(job, "n1")
    async with connect(settings, "sender") as bus, listener(settings, job) as process:
        assert await bus.deliver(subject, order(job), within_s=10)
        process.kill()
        await process.wait()
        await until_async(
            lambda: bus.deliver(subject, order(job), within_s=0.5),
            "it is known to be gone",
            holds=not_,
            despite=BusTimeoutError,  # the server has not read the end of the connection yet
        )


async def test_a_listener_who_is_only_paused_is_never_gone(
    shared_nats: DevServer, job: str
) -> None:
    """Silence is a timeout, and no word that it is gone (A15.2)."""
    settings = shared_nats.settings(SERVICE)
    subject = subjects.order(job, "n1")
    async with connect(settings, "sender") as bus, listener(settings, job) as process:
        await stopped(process.pid)
        with pytest.raises(BusTimeoutError):
            await bus.deliver(subject, order(job), within_s=0.3)
        os.kill(process.pid, signal.SIGCONT)
        assert await bus.deliver(subject, order(job), within_s=10)


def quick(settings: BusSettings) -> BusSettings:
    return msgspec.structs.replace(settings, reconnect_jitter_s=0.01, reconnect_wait_s=0.2)


async def test_while_we_are_away_nobody_is_gone(nats: DevServer, job: str) -> None:
    """While our own connection is away, nothing is known of others (A15.2)."""
    subject = subjects.order(job, "n1")
    async with connect(quick(nats.settings(SERVICE)), "sender") as bus:
        await stopped(nats.pid)
        with pytest.raises(BusTimeoutError):
            await bus.deliver(subject, order(job), within_s=0.2)
        os.kill(nats.pid, signal.SIGKILL)
        await until_async(lambda: not bus.connected, "the connection is gone")
        with pytest.raises(BusUnreachableError, match="no connection"):
            await bus.deliver(subject, order(job), within_s=40)
        await bus.wait_connected()
        # as everybody else, an agent needs its time to come back: that is not evidence
        connection = bus.jetstream.connection
        settings = connection.settings
        connection._settings = msgspec.structs.replace(settings, reconnect_wait_s=3600.0)
        with pytest.raises(BusUnreachableError, match="other clients may still be reconnecting"):
            await bus.deliver(subject, order(job), within_s=40)
        connection._settings = settings
        await until_async(
            lambda: bus.deliver(subject, order(job), within_s=40),
            "soon enough it is, though",
            holds=not_,
            despite=BusUnreachableError,
        )


async def test_a_connection_that_breaks_meanwhile_is_no_answer(nats: DevServer, job: str) -> None:
    subject = subjects.order(job, "n1")
    settings = quick(nats.settings(SERVICE))
    async with connect(settings, "sender") as bus, listener(settings, job) as process:
        await stopped(process.pid)

        async def break_it() -> None:
            await until_async(lambda: bus.jetstream._waiting, "the order is on its way")
            os.kill(nats.pid, signal.SIGKILL)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(break_it())
            with pytest.raises(BusUnreachableError, match="broke before"):
                await bus.deliver(subject, order(job), within_s=30)


@pytest.fixture
async def agent(nats: DevServer) -> AsyncIterator[NatsBus]:
    """An agent of `job-a`, with what its role may do and no more."""
    async with connect(await nats.grant("job-a"), "agent") as bus:
        yield bus


async def test_an_agent_answers_its_orders_and_may_write_into_no_other_inbox(
    nats: DevServer, agent: NatsBus
) -> None:
    async with connect(nats.settings(SERVICE), "rendezvous") as rendezvous:
        async with (
            agent.subscribe(subjects.order("job-a"), StandBy) as to_all,
            agent.subscribe(subjects.order("job-a", "n1"), StandBy) as to_one,
        ):
            for _ in range(20):
                assert await rendezvous.deliver(
                    subjects.order("job-a"), order("job-a"), within_s=40
                )
                assert await rendezvous.deliver(
                    subjects.order("job-a", "n1"), order("job-a"), within_s=40
                )
                assert (await to_all.get()).job == (await to_one.get()).job == "job-a"
        inbox = rendezvous.jetstream.inbox
        token = inbox.rpartition(".")[2]
        others = (f"{inbox}.1", "_INBOX.x", subjects.heard("job-b", token, "1"))
        for subject in others:
            with pytest.raises(BusDeniedError):
                await agent.jetstream.request(subject, b"forged", within_s=40)


async def test_an_agent_cannot_ask_who_listens_to_another_job(agent: NatsBus) -> None:
    """The question is denied (A13.2)."""
    with pytest.raises(BusDeniedError):
        await agent.deliver(subjects.order("job-b", "n1"), order("job-b"), within_s=40)
