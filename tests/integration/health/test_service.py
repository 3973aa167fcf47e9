"""The observer on a real bus: what it records, once, and what becomes of it without the bus."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from everstep import ids, subjects
from everstep.bus import connect, topology
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusTimeoutError, SpoolFullError
from everstep.bus.server.dev_server import DevServer
from everstep.clock import Clock
from everstep.messages import Fact, JobEnded, NodeBeat, NodeLost, NodeReturned
from everstep.messages.codec import decode
from everstep_services.health.observer import HealthObserver
from everstep_services.health.replica import HealthReplica
from everstep_services.health.settings import HealthSettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock, NotedClock
from tests.integration.bus.servers import stopped
from tests.integration.health.replicas import at_work
from tests.waiting import until_async

QUICK = HealthSettings(
    silence_limit_s=2.5, all_silent_limit_s=60.0, reconnect_grace_s=2.0, tick_s=0.1
)


class Agents:
    """Nodes that beat until they fall silent."""

    def __init__(self, bus: NatsBus, job: str, names: list[str]) -> None:
        self._bus = bus
        self._job = job
        self.speaking = set(names)
        self._sequence = 0

    def beat(self) -> None:
        self._sequence += 1
        for name in self.speaking:
            beat = NodeBeat(
                job=self._job,
                node=name,
                sequence=self._sequence,
                at=datetime.now(UTC),
                state="standby",
            )
            self._bus.send(subjects.beat(self._job, name), beat)


class BeatClock(NotedClock):
    """Whenever an observer begins to wait, as before each of its ticks, the nodes beat."""

    def __init__(self, agents: Agents) -> None:
        super().__init__()
        self._agents = agents

    async def sleep(self, seconds: float) -> None:
        self._agents.beat()
        await super().sleep(seconds)


@asynccontextmanager
async def watched(bus: NatsBus, clock: Clock | None = None) -> AsyncIterator[HealthObserver]:
    """An observer at work, in a whole replica."""
    async with at_work(bus, QUICK, clock) as health:
        yield health.observer


async def facts_of(bus: NatsBus, job: str, until: type[Fact]) -> list[Fact]:
    """The job's facts, up to the first of a kind."""
    found: list[Fact] = []
    async with bus.facts(None) as reader:
        while True:
            for one in (await reader.fetch(1000, 1)).facts:
                fact = decode(one.data)
                if isinstance(fact, Fact) and fact.job == job:
                    found.append(fact)
                    if isinstance(fact, until):
                        return found


async def known(observer: HealthObserver, nodes: int) -> None:
    await until_async(
        lambda: observer.statistics()["nodes"], f"{nodes} nodes", holds=lambda n: n == nodes
    )


async def test_two_observers_record_one_loss_and_one_return(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    settings = shared_nats.settings(SERVICE)
    async with (
        connect(settings, "health", spool=tmp_path / "one") as one,
        connect(settings, "health", spool=tmp_path / "other") as other,
        connect(settings, "agents") as agents_bus,
        watched(one, BeatClock(agents := Agents(agents_bus, job, ["n1", "n2"]))) as first,
        watched(other) as second,
        one.subscribe(subjects.lost(job), NodeLost) as heard,
    ):
        await known(first, 2)
        await known(second, 2)
        agents.speaking.discard("n2")
        loss = await heard.get()  # as rendezvous hears it
        said = [await heard.get() for _ in range(4)]
        await known(first, 1)
        await known(second, 1)
        agents.speaking.add("n2")
        await known(first, 2)
        await known(second, 2)
        await facts_of(one, job, NodeReturned)
        end = JobEnded(
            id=ids.new_id(),
            job=job,
            at=datetime.now(UTC),
            source="test",
            state="done",
            exit_code=0,
            reason="test",
        )
        for bus in (one, other):
            await bus.flush(30)
        await one.record(end)
        found = await facts_of(one, job, JobEnded)
    assert [type(fact) for fact in found] == [NodeLost, NodeReturned, JobEnded]
    assert {one.id for one in (loss, *said)} == {found[0].id}, "said again, it is the same"
    assert loss.node == "n2"
    assert loss.silence_s >= 2.5
    assert "n1 was heard" in loss.reason


async def test_a_server_that_goes_and_comes_back_costs_nobody_a_node(
    nats: DevServer, job: str, tmp_path: Path
) -> None:
    """A hanging NATS server loses no node (A15.2)."""
    settings = msgspec.structs.replace(
        nats.settings(SERVICE), reconnect_jitter_s=0.01, reconnect_wait_s=0.1
    )
    async with (
        connect(settings, "health", spool=tmp_path / "health") as bus,
        connect(settings, "agents") as agents_bus,
    ):
        await topology.init(bus.jetstream)
        clock = BeatClock(Agents(agents_bus, job, ["n1", "n2", "n3"]))
        async with watched(bus, clock) as observer:
            await known(observer, 3)
            await stopped(nats.pid)  # the connection looks fine
            ticks, past = len(clock.waits), QUICK.silence_limit_s + 5 * QUICK.tick_s
            await until_async(
                lambda: sum(w for w in clock.waits[ticks:] if w <= QUICK.tick_s) > past,
                "silence was judged past its limit",
            )
            os.kill(nats.pid, signal.SIGKILL)
            await until_async(lambda: not bus.connected, "the connection is gone")
            await bus.wait_connected()
            beats = observer.statistics()["beats_total"] + 30
            await until_async(
                lambda: observer.statistics()["beats_total"] >= beats, "all are heard again"
            )
            assert observer.statistics()["lost_total"] == 0
            assert observer.statistics()["nodes"] == 3


class _FullBus(MemoryBus):
    """Its disk takes nothing until somebody makes room."""

    is_full = True

    async def record(self, *facts: Fact) -> None:
        if self.is_full:
            raise SpoolFullError("full")
        await super().record(*facts)


async def test_findings_wait_while_the_disk_is_full_and_are_recorded_once() -> None:
    server, clock = MemoryServer(), FakeClock()
    bus = _FullBus(server)
    health = HealthReplica(HealthSettings(), bus, clock)
    observer = health.observer
    async with asyncio.TaskGroup() as tasks:
        loops = [
            tasks.create_task(observer.hear_for_ever()),
            tasks.create_task(observer.judge_for_ever()),
            tasks.create_task(health.records.record_for_ever()),
            tasks.create_task(health.ids.keep_for_ever()),
        ]
        waiting: dict[int, float] = {}
        for second in range(30):
            bus.is_full = second < 20
            for name in ("n1", "n2", "n3") if second < 5 else ("n1",):
                beat = NodeBeat(
                    job="j", node=name, sequence=second, at=clock.wall(), state="standby"
                )
                bus.send(subjects.beat("j", name), beat)
            for _ in range(4):
                await clock.advance(0.25)
            waiting[second] = health.statistics()["findings_waiting"]
        for loop in loops:
            loop.cancel()
    assert (waiting[12], waiting[25]) == (2, 0)
    facts = [decode(one.data) for one in server.facts]
    assert [fact.node for fact in facts if isinstance(fact, NodeLost)] == ["n2", "n3"]
    assert [fact.limit_s for fact in facts if isinstance(fact, NodeLost)] == [3.0, 3.0]
    assert observer.statistics()["lost_total"] == 2


async def test_it_runs_as_a_process_and_stops_when_asked(nats: DevServer, tmp_path: Path) -> None:
    settings = nats.settings(SERVICE)
    environment = {
        "EVERSTEP_BUS__URL": settings.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(settings.credentials_file),
        "EVERSTEP_BUS__SPOOL_DIR": str(tmp_path / "spool"),
        "EVERSTEP_OBSERVE__PORT": "0",
    }
    async with connect(settings, "look") as bus:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "everstep_services.health"],
            env={**os.environ, **environment},
            stderr=asyncio.subprocess.PIPE,
        )
        await until_async(
            lambda: bus.deliver(subjects.beat("j", "n"), _beat(), within_s=5),
            "somebody hears",
            despite=BusTimeoutError,  # it may listen before it takes anything in
        )
        process.terminate()
        _, said = await process.communicate()
    assert process.returncode == 0, said


async def test_without_a_place_for_its_findings_it_says_so(nats: DevServer) -> None:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "everstep_services.health"],
        env={**os.environ, "EVERSTEP_BUS__URL": nats.url, "EVERSTEP_OBSERVE__PORT": "0"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"set spool_dir in [bus]" in said


def _beat() -> NodeBeat:
    return NodeBeat(job="j", node="n", sequence=1, at=datetime.now(UTC), state="standby")
