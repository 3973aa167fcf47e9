"""A job runner, its bus, and other replicas: it decides by no document that it knows is old."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from everstep.clock import SystemClock
from everstep.messages import Fact, Joined, Leave, Report, Reported, RoundDocument, StartRanks
from everstep_services.rendezvous.domain.events import JobControl
from everstep_services.rendezvous.job_runner import BUCKET, JobRunner, ReplicaContext
from everstep_services.rendezvous.settings import RendezvousSettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.unit.rendezvous.world import World, spec


async def test_a_desk_that_wakes_first_when_the_bus_is_back_forgets_all_the_same() -> None:
    server = MemoryServer()
    join = World(spec(1)).ask("a")
    async with asyncio.TaskGroup() as tasks:
        around = ReplicaContext(
            RendezvousSettings(), MemoryBus(server), SystemClock(), lambda _: JobControl(), tasks
        )
        runner = JobRunner("j", around)
        working = tasks.create_task(runner.work_for_ever())
        await runner.ask(join)
        before = runner._memory
        await runner.ask(join)
        assert runner._memory is before
        await server.set_up(up=False)
        asked = tasks.create_task(runner.ask(join))  # nobody else tells it that the bus was away
        await server.set_up(up=True)
        await asked
        assert runner._memory is not before
        working.cancel()


@asynccontextmanager
async def replicas(server: MemoryServer, count: int) -> AsyncIterator[list[JobRunner]]:
    """Replicas of one job that no announcement of a newer document reaches."""
    async with asyncio.TaskGroup() as tasks:
        runners, working = [], []
        for _ in range(count):
            around = ReplicaContext(
                RendezvousSettings(),
                MemoryBus(server),
                SystemClock(),
                lambda _: JobControl(),
                tasks,
            )
            runners.append(JobRunner("j", around))
            working.append(tasks.create_task(runners[-1].work_for_ever()))
        yield runners
        for work in working:
            work.cancel()


def report(order: StartRanks, event: str) -> Report:
    return Report(
        job="j",
        node="a",
        instance="a-1",
        slot=order.slot,
        round=order.round,
        event=event,
        reason=event,
    )


async def joined(runner: JobRunner, world: World) -> StartRanks:
    reply = await runner.ask(world.ask("a"))
    assert isinstance(reply, Joined)
    assert isinstance(reply.order, StartRanks)
    return reply.order


async def seats(server: MemoryServer) -> dict[str, str]:
    document = await MemoryBus(server).documents(BUCKET).get("j")
    assert document.data is not None
    decoded = msgspec.json.decode(document.data, type=RoundDocument)
    return {seat.node: seat.stage for seat in decoded.seats}


async def test_a_report_of_a_round_that_another_replica_formed_counts() -> None:
    """The report comes to a replica before the announcement of the document with that round."""
    server, world = MemoryServer(), World(spec(2))
    async with replicas(server, 2) as (first, second):
        await first.ask(world.ask("b"))
        await second.ask(world.ask("b"))
        order = await joined(first, world)
        reply = await second.ask(report(order, "started"))
        assert isinstance(reply, Reported)
        assert (reply.round, reply.is_current) == (1, True)
        assert await seats(server) == {"a": "running", "b": "starting"}


async def test_a_report_of_a_job_that_another_replica_began_counts() -> None:
    """The replica was asked about the job before there was a document."""
    server, world = MemoryServer(), World(spec(1))
    async with replicas(server, 2) as (first, second):
        leave = Leave(job="j", node="a", instance="a-0", round=0, cause="operator", reason="bye")
        await second.ask(leave)
        order = await joined(first, world)
        reply = await second.ask(report(order, "started"))
        assert isinstance(reply, Reported)
        assert reply.is_current


async def test_an_agent_leaves_although_this_replica_has_not_heard_of_it() -> None:
    """The goodbye comes to a replica before the announcement that the agent has joined."""
    server, world = MemoryServer(), World(spec(2))
    async with replicas(server, 2) as (first, second):
        await first.ask(world.ask("b"))
        await second.ask(world.ask("b"))
        await joined(first, world)
        leave = Leave(job="j", node="a", instance="a-1", round=1, cause="operator", reason="bye")
        await second.ask(leave)
        assert (await seats(server))["a"] == "gone"


async def test_an_agent_that_waits_hears_of_the_round_from_a_replica_that_was_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers pass its questions to the nearest replica, always to the same one."""
    monkeypatch.setattr("everstep_services.rendezvous.job_runner._CURRENT_FOR_S", 0.0)
    server, world = MemoryServer(), World(spec(2))
    async with replicas(server, 2) as (first, second):
        await first.ask(world.ask("b"))
        await second.ask(world.ask("b"))
        await joined(first, world)
        reply = await second.ask(world.ask("b"))
        assert isinstance(reply, Joined)
        assert isinstance(reply.order, StartRanks)


async def test_a_report_that_is_old_for_all_replicas_is_answered_as_such() -> None:
    server, world = MemoryServer(), World(spec(1))
    async with replicas(server, 1) as (runner,):
        order = await joined(runner, world)
        reply = await runner.ask(report(msgspec.structs.replace(order, round=0), "rank_exited"))
        assert isinstance(reply, Reported)
        assert (reply.round, reply.is_current) == (1, False)


async def test_a_decision_that_another_replica_has_overtaken_leaves_no_timers() -> None:
    """They would run on, and a later phase of this name would seem to last for hours already."""
    server, world = MemoryServer(), World(spec(2))
    async with replicas(server, 2) as (first, second):
        await first.ask(world.ask("b"))
        await second.ask(world.ask("b"))
        await joined(first, world)
        await second.ask(msgspec.structs.replace(world.ask("b"), known_round=1))
        assert ("phase", 1, "joining") not in second._memory.started
        assert ("phase", 1, "forming") in second._memory.started


async def test_a_larger_document_is_written_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write encodes and compresses all of it, so more questions must share it."""
    monkeypatch.setattr("everstep_services.rendezvous.job_runner._GATHERED_BYTES", 10)
    server, world, slept = MemoryServer(), World(spec(3)), []

    class Clock(SystemClock):
        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    async with asyncio.TaskGroup() as tasks:
        around = ReplicaContext(
            RendezvousSettings(), MemoryBus(server), Clock(), lambda _: JobControl(), tasks
        )
        runner = JobRunner("j", around)
        working = tasks.create_task(runner.work_for_ever())
        for node in ("a", "b"):
            await runner.ask(world.ask(node))
        working.cancel()
    assert slept[0] == around.settings.gather_s
    assert slept[-1] > 10 * around.settings.gather_s


async def test_the_next_batch_waits_for_no_disk_that_keeps_facts() -> None:
    """They are in the document; only its next version waits, to be written without them."""
    server, world = MemoryServer(), World(spec(3))
    may_keep = asyncio.Event()

    class SlowBus(MemoryBus):
        async def record(self, *facts: Fact) -> None:
            await may_keep.wait()
            await super().record(*facts)

    async with asyncio.TaskGroup() as tasks:
        around = ReplicaContext(
            RendezvousSettings(), SlowBus(server), SystemClock(), lambda _: JobControl(), tasks
        )
        runner = JobRunner("j", around)
        working = tasks.create_task(runner.work_for_ever())
        await runner.ask(world.ask("a"))
        await runner.ask(world.ask("a"))  # changes nothing
        second = tasks.create_task(runner.ask(world.ask("b")))
        may_keep.set()
        await second
        assert "a" in await seats(server)
        working.cancel()
    document = await MemoryBus(server).documents(BUCKET).get("j")
    assert document.data is not None
    left = msgspec.json.decode(document.data, type=RoundDocument).outbox
    assert not any('"node":"a"' in text for text in left)
