"""A replica of straggler, or timings, stop for a while: nothing is lost or said twice."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from everstep import subjects
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import ShowTimings, StragglerCleared, StragglerFound, TimingTable
from everstep_services.health.nodes.control import blank, switched
from everstep_services.straggler.domain.job import JobJudge
from tests.integration.straggler.replicas import (
    Nodes,
    at_work,
    document,
    found,
    judged,
    said,
    switch,
    window_of,
)
from tests.unit.straggler.windows import Delay, Simulation, Training
from tests.waiting import until_async

SLOW_RANK, STEPS = 5, 16


class Trained:
    """A simulated training whose rank 5 is slow in the windows 0 to 5, and from 20 on."""

    def __init__(self, bus: NatsBus, job: str) -> None:
        delays = (
            Delay(SLOW_RANK, 0.03, "data", last=6 * STEPS),
            Delay(SLOW_RANK, 0.03, "data", first=20 * STEPS + 1, last=26 * STEPS),
        )
        self._bus = bus
        self._simulation = Simulation(Training(job=job, delays=delays))
        self.windows = 0

    def send(self, until: int) -> None:
        while self.windows < until:
            self.windows += 1
            for timings in self._simulation.window(STEPS):
                self._bus.send(subjects.timing(timings.job, timings.node), timings)


@asynccontextmanager
async def process(nats: DevServer, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    settings = nats.settings(SERVICE)
    environment = {
        "EVERSTEP_BUS__URL": settings.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(settings.credentials_file),
        "EVERSTEP_BUS__SPOOL_DIR": str(folder / "process"),
        "EVERSTEP_OBSERVE__PORT": "0",
        "EVERSTEP_STRAGGLER__TICK_S": "0.02",
    }
    command = (sys.executable, "-m", "everstep_services.straggler")
    started = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})
    try:
        yield started
    finally:
        started.kill()
        await started.wait()


async def test_a_replica_that_was_stopped_takes_nothing_back_and_says_nothing_twice(
    shared_nats: DevServer, bus: NatsBus, job: str, tmp_path: Path
) -> None:
    """Another one goes on; what the first says late is known, or older than what is known."""
    training = Trained(bus, job)
    async with process(shared_nats, tmp_path) as stopped:
        other = Trained(bus, f"{job}-before")

        async def hears() -> int:
            other.send(other.windows + 1)
            return await window_of(bus, f"{job}-before")

        await until_async(hears, "the process hears windows")
        training.send(4)
        first = (await found(bus, job, SLOW_RANK)).found[0]
        async with at_work(bus, make_judge=JobJudge):
            os.kill(stopped.pid, signal.SIGSTOP)
            training.send(18)
            await said(bus, job, StragglerCleared, 1)
            training.send(24)
            second = (await found(bus, job, SLOW_RANK)).found[0]
            assert second.finding != first.finding
        os.kill(stopped.pid, signal.SIGCONT)
        await judged(bus, job, 24 * STEPS)
        training.send(25)
        await judged(bus, job, 25 * STEPS)
        assert (await found(bus, job, SLOW_RANK)).found[0].finding == second.finding
        assert len(await said(bus, job, StragglerCleared, 1)) == 1, "not the second one"
        training.send(44)
        await found(bus, job)
    kinds = (StragglerFound, StragglerCleared)
    told = [await said(bus, job, kind, 2) for kind in kinds]
    assert [[one.id for one in told[0]]] == [[first.finding, second.finding]]
    cleared = [one.finding for one in told[1] if isinstance(one, StragglerCleared)]
    assert cleared == [first.finding, second.finding]


async def test_timings_that_are_switched_off_amid_a_finding_end_it_and_begin_anew(
    bus: NatsBus, job: str
) -> None:
    """Neither lost nor doubled (A6.5)."""
    nodes = Nodes(bus, job)
    async with at_work(bus):
        nodes.send("n1")
        await found(bus, job, 1)
        off = switched(blank(), {"straggler.timings": "off"}, "ann", "")
        await switch(bus, job, off)
        (cleared,) = await said(bus, job, StragglerCleared, 1)
        assert isinstance(cleared, StragglerCleared)
        assert cleared.reason == "timings were switched off"
        await until_async(
            lambda: document(bus, job),
            "agents can read it",
            holds=lambda seen: not seen.is_on and not seen.found,
        )
        await switch(bus, job, switched(off, {"straggler.timings": "on"}, "ann", ""))
        await until_async(lambda: document(bus, job), "on again", holds=lambda seen: seen.is_on)
        nodes.send("n1")
        await found(bus, job, 1)
    first, second = await said(bus, job, StragglerFound, 2)
    assert first.id != second.id
    assert len(await said(bus, job, StragglerCleared, 1)) == 1


async def test_windows_that_are_missing_are_gaps_in_the_table(bus: NatsBus, job: str) -> None:
    training = Trained(bus, job)
    async with at_work(bus, make_judge=JobJudge):
        training.send(2)
        await judged(bus, job, 2 * STEPS)
        for _ in range(3):
            training._simulation.window(STEPS)
        training.send(4)
        await judged(bus, job, 7 * STEPS)
        question = ShowTimings(job=job)
        table = await bus.ask("straggler", "timings", question, TimingTable, job=job, within_s=30)
    assert [last // STEPS for _, last in table.windows] == [1, 2, 6, 7]
    assert {len(row.values) for row in table.rows} == {4}
