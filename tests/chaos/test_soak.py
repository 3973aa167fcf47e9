"""Weeks of trouble, compressed: nothing grows in the client, nothing is left on the server."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil
import pytest

from everstep import subjects
from everstep.bus import connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusError
from everstep.bus.server.dev_server import DevServer
from everstep.ids import new_id
from everstep.messages import Done, Message, NodeBeat, ProgressMade, ShowRound
from tests.waiting import WITHIN_S

CYCLES, WARM_UP = 150, 50
GROWTH = 1.05


async def fact(bus: NatsBus) -> None:
    await bus.record(
        ProgressMade(id=new_id(), job="soak", at=datetime.now(UTC), source="soak", round=0, step=1)
    )


async def follow(bus: NatsBus) -> None:
    async with bus.documents("LIMITS").follow("soak") as news:
        await anext(news)


async def subscribe(bus: NatsBus) -> None:
    async with bus.subscribe(subjects.beat("soak"), NodeBeat) as heard:
        sent = NodeBeat(job="soak", node="n", sequence=1, at=datetime.now(UTC), state="running")
        bus.send(subjects.beat("soak", "n"), sent)
        await heard.get()


async def answer(bus: NatsBus) -> None:
    async def show(_: Message) -> Message:
        return Done()

    async with bus.answer("soak", {"show": show}):
        await bus.ask("soak", "show", ShowRound(job="soak"), Done, job="soak", within_s=5)


async def lease(bus: NatsBus) -> None:
    held = await bus.leases.acquire("soak", "me", 5)
    if held is not None:
        await bus.leases.release(held)


async def blob(bus: NatsBus) -> None:
    await bus.blobs.get(await bus.blobs.put("soak", b"the same evidence" * 1000))


async def read(bus: NatsBus) -> None:
    async with bus.facts(None) as reader:
        await reader.fetch(10, 0.5)


WORK: list[Callable[[NatsBus], Awaitable[None]]] = [
    fact, follow, subscribe, answer, lease, blob, read,
]  # fmt: skip


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_nothing_grows_over_many_reconnects(nats: DevServer, tmp_path: Path) -> None:
    """Tasks, descriptors, memory and consumers after 150 cycles (A14.7)."""
    settings = msgspec.structs.replace(
        nats.settings("service"),
        reconnect_jitter_s=0.01,
        reconnect_wait_s=0.05,
        request_within_s=5.0,  # as in production: a server that was killed does not answer
    )
    async with connect(settings, "soak", spool=tmp_path / "spool") as bus:
        await topology.init(bus.jetstream)
        me = psutil.Process()
        marks: list[tuple[int, int, int]] = []
        for cycle in range(WARM_UP + CYCLES):
            for work in WORK:
                try:
                    async with asyncio.timeout(WITHIN_S):
                        await work(bus)
                except BusError:
                    continue  # the server was just killed
            if cycle % 5 == 0:
                os.kill(nats.pid, signal.SIGKILL)
            elif cycle % 5 == 2:
                transport = bus.jetstream.connection.client._transport
                assert transport is not None
                transport.close()  # type: ignore[no-untyped-call]
            if cycle in {WARM_UP - 1, WARM_UP + CYCLES - 1}:
                await bus.flush(30)
                await bus.prove()
                marks.append((len(asyncio.all_tasks()), me.num_fds(), me.memory_info().rss))
        info = await bus.jetstream.api("STREAM.INFO.FACTS")
        limits = await bus.jetstream.api("STREAM.INFO.KV_LIMITS")
    (tasks, descriptors, memory), (tasks_then, descriptors_then, memory_then) = marks
    print(f"tasks {tasks} → {tasks_then}, files {descriptors} → {descriptors_then}, "
          f"memory {memory >> 20} → {memory_then >> 20} MiB, restarts {nats.restarts}")  # fmt: skip
    assert tasks_then <= tasks + 2
    assert descriptors_then <= descriptors + 2
    assert memory_then <= memory * GROWTH
    assert info["state"]["consumer_count"] <= 1  # the last reader's, if its end was not heard
    assert limits["state"]["consumer_count"] == 0
