"""Straggler on a real bus: what it writes and records, once, whichever replica is there."""

import asyncio
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from threading import Event

import msgspec
import pytest

from everstep import ids, subjects
from everstep.bus import connect, topology
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError
from everstep.bus.server.dev_server import DevServer
from everstep.clock import SystemClock
from everstep.messages import (
    AllocationEnded,
    FaultInjected,
    HeatMapDrawn,
    JobEnded,
    RankScoreTable,
    ShowScores,
    StragglerCleared,
    StragglerFound,
    encode,
)
from everstep_services.straggler.domain.changes import Change
from everstep_services.straggler.domain.findings import blank as blank_document
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.jobs import TrackedJob
from everstep_services.straggler.rank_report import report_lines
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock
from tests.integration.straggler.replicas import (
    QUICK,
    Nodes,
    SimpleJudge,
    at_work,
    document,
    found,
    said,
)
from tests.unit.straggler.windows import Delay, Simulation, Training
from tests.waiting import until_async


class LeapingClock(SystemClock):
    """The system's, ahead by as much as a test says."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


def _is_over(tracked: TrackedJob) -> bool:
    return not tracked.document.found


async def test_two_replicas_record_one_finding_and_its_end_once(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    settings = shared_nats.settings(SERVICE)
    async with (
        connect(settings, "straggler", spool=tmp_path / "one") as one,
        connect(settings, "straggler", spool=tmp_path / "other") as other,
        connect(settings, "agents") as agents,
        at_work(one) as first,
        at_work(other) as second,
    ):
        nodes = Nodes(agents, job)
        nodes.send("n1")
        known = (await found(one, job, 1)).found[0]
        nodes.send("n1")
        nodes.send()
        assert (await found(one, job)).round == 1
        for bus in (one, other):
            await bus.flush(30)
        (finding,) = await said(one, job, StragglerFound, 1)
        (cleared,) = await said(one, job, StragglerCleared, 1)
        assert isinstance(finding, StragglerFound)
        assert isinstance(cleared, StragglerCleared)
        assert (finding.id, finding.node, finding.rank) == (known.finding, "n1", 1)
        assert (cleared.finding, cleared.reason) == (finding.id, "it keeps up")
        assert cleared.lasted_s is not None
        both = (first.statistics(), second.statistics())
        assert sum(one["found_total"] for one in both) == 1
        assert sum(one["cleared_total"] for one in both) == 1
        for replica in (first, second):
            tracked = replica.jobs.get(job)
            assert tracked is not None
            await until_async(partial(_is_over, tracked), "both know that it is over")


async def test_a_rank_that_somebody_makes_slow_on_purpose_is_slow_by_injection(
    bus: NatsBus, job: str
) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus) as replica:
        fault = FaultInjected(
            id=ids.new_id(), job=job, at=SystemClock().wall(), source="agent", round=1,
            fault="slow", by="ann@n0", node="n1", rank=1,
        )  # fmt: skip
        await bus.record(fault)
        await until_async(lambda: replica.jobs.get(job) is not None, "it knows of the fault")
        nodes.send("n1")
        (known,) = (await found(bus, job, 1)).found
        nodes.send()
        await found(bus, job)
        nodes.round = 2
        nodes.send("n1")
        (later,) = (await found(bus, job, 1)).found
    assert (known.cause, later.cause) == ("injected", "host")
    (finding, _) = await said(bus, job, StragglerFound, 2)
    assert isinstance(finding, StragglerFound)
    assert finding.cause == "injected"
    assert finding.reason.startswith("ann@n0 injected slow; ")


async def test_a_replica_that_is_started_amid_a_finding_goes_on_with_it(
    bus: NatsBus, job: str
) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus):
        nodes.send("n1")
        known = (await found(bus, job, 1)).found
    async with at_work(bus):
        nodes.send("n1")
        nodes.send()
        await found(bus, job)
    (cleared,) = await said(bus, job, StragglerCleared, 1)
    assert isinstance(cleared, StragglerCleared)
    assert cleared.finding == known[0].finding
    assert len(await said(bus, job, StragglerFound, 1)) == 1


async def test_what_a_replica_had_no_time_to_record_another_one_does(
    bus: NatsBus, job: str
) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus):
        nodes.send("n1")
        before = await found(bus, job, 1)
    (fact,) = await said(bus, job, StragglerFound, 1)
    lost = msgspec.structs.replace(fact, id=ids.new_id())
    text = encode(lost).decode()
    left = msgspec.structs.replace(before, outbox=(text,))
    await bus.documents("STRAGGLERS").put(job, encode(left), revision=None)
    async with at_work(bus):
        await found(bus, job, 1)
    assert [one.id for one in await said(bus, job, StragglerFound, 2)] == [fact.id, lost.id]


async def test_a_new_round_and_the_end_of_the_job_clear_what_was_found(
    bus: NatsBus, job: str
) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus) as straggler:
        nodes.send("n1")
        await found(bus, job, 1)
        nodes.round = 2
        nodes.send("n0")
        await found(bus, job, 0)
        end = JobEnded(
            id=ids.new_id(), job=job, at=straggler.observer._clock.wall(), source="test",
            state="done", exit_code=0, reason="test",
        )  # fmt: skip
        await bus.record(end)
        await found(bus, job)
        nodes.send("n0")  # what was measured before the end
        await until_async(
            lambda: straggler.statistics()["refused_total"],
            "both nodes are refused",
            holds=lambda count: count == 2,
        )
        assert (await found(bus, job)).round == 2
        pictures = await said(bus, job, HeatMapDrawn, 20)
        assert [getattr(part, "first_rank", None) for part in pictures] == [*range(0, 20_000, 1024)]
    reasons = [
        one.reason
        for one in await said(bus, job, StragglerCleared, 2)
        if isinstance(one, StragglerCleared)
    ]
    assert reasons == ["its round ended", "its job ended"]


async def test_the_picture_of_a_job_that_no_agent_runs_is_kept(bus: NatsBus, job: str) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus):
        nodes.send("n1")
        await found(bus, job, 1)
        end = AllocationEnded(
            id=ids.new_id(), job=job, at=SystemClock().wall(), source="test",
            allocation="a", state="stopped", reason="Ctrl-C",
        )  # fmt: skip
        await bus.record(end)
        picture = (await said(bus, job, HeatMapDrawn, 1))[0]  # of the first of many ranks
    assert isinstance(picture, HeatMapDrawn)
    assert picture.windows


async def test_a_job_that_falls_silent_is_forgotten_with_what_was_found(
    bus: NatsBus, job: str
) -> None:
    nodes, clock = Nodes(bus, job), LeapingClock()
    async with at_work(bus, clock=clock) as straggler:
        nodes.send("n1")
        await found(bus, job, 1)
        clock.ahead_s += QUICK.forget_after_s
        (cleared,) = await said(bus, job, StragglerCleared, 1)
        await until_async(lambda: straggler.jobs.get(job) is None, "the job is forgotten")
        assert await document(bus, job) is None
        assert isinstance(cleared, StragglerCleared)
        assert cleared.reason.startswith("its job has sent nothing for")


async def test_while_the_bus_is_away_only_windows_are_missing(
    nats: DevServer, job: str, tmp_path: Path
) -> None:
    settings = msgspec.structs.replace(
        nats.settings(SERVICE), reconnect_jitter_s=0.01, reconnect_wait_s=0.1
    )
    async with (
        connect(settings, "straggler", spool=tmp_path / "straggler") as bus,
        at_work(bus) as straggler,
    ):
        await topology.init(bus.jetstream)
        nodes = Nodes(bus, job)
        nodes.send("n1")
        known = (await found(bus, job, 1)).found
        os.kill(nats.pid, signal.SIGKILL)
        await until_async(lambda: not bus.connected, "the connection is gone")
        await bus.wait_connected()
        heard = straggler.statistics()["messages_total"]

        def is_heard() -> bool:
            nodes.send()
            return straggler.statistics()["messages_total"] > heard

        await until_async(is_heard, "windows are heard again")
        await found(bus, job)
        (cleared,) = await said(bus, job, StragglerCleared, 1)
        assert isinstance(cleared, StragglerCleared)
        assert cleared.finding == known[0].finding


async def test_a_message_about_another_job_than_its_subject_is_not_heard(
    bus: NatsBus, job: str
) -> None:
    async with at_work(bus) as straggler:
        nodes = Nodes(bus, job)
        real, nodes.job = subjects.timing(job, "n0"), "another"
        send = bus.send
        nodes._bus = type("Lying", (), {"send": lambda _, __, message: send(real, message)})()
        nodes.send()
        Nodes(bus, job).send("n1")
        await found(bus, job, 1)
        assert straggler.jobs.get("another") is None


async def test_the_real_judge_finds_a_slow_rank_and_a_new_replica_clears_it(
    bus: NatsBus, job: str
) -> None:
    """Named within three windows, and cleared by a replica that was not there (A6.1, A6.2)."""
    delay = Delay(5, 0.03, "data", last=6 * 16)
    simulation = Simulation(Training(job=job, delays=(delay,), offset_s=0.5))

    def send(windows: int) -> None:
        for _ in range(windows):
            for timings in simulation.window():
                bus.send(subjects.timing(job, timings.node), timings)

    async with at_work(bus, make_judge=JobJudge) as straggler:
        send(4)
        (known,) = (await found(bus, job, 5)).found
        assert (known.node, known.cause) == (simulation.window()[1].node, "input")
        tracked = straggler.jobs.get(job)
        assert tracked is not None
        relative, *_ = report_lines(tracked.work.judge.scores(99, ""), 2)
        assert "worst='rank 5 on " in relative
        assert straggler.statistics()["ratio_max"] > 0.2
        ask = ShowScores(job=job, role="nope")
        with pytest.raises(AskRefusedError, match="the role 'nope': use one of all ranks"):
            await bus.ask("straggler", "scores", ask, RankScoreTable, job=job, within_s=30)
    async with at_work(bus, make_judge=JobJudge):
        send(9)
        await found(bus, job)
    (cleared,) = await said(bus, job, StragglerCleared, 1)
    assert isinstance(cleared, StragglerCleared)
    assert cleared.finding == known.finding
    assert len(await said(bus, job, StragglerFound, 1)) == 1


async def test_windows_by_time_are_judged_until_somebody_counts_steps(
    bus: NatsBus, job: str
) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus) as straggler:
        nodes.is_by_time = True
        nodes.send("n1")
        await found(bus, job, 1)
        ask = ShowScores(job=job)
        table = await bus.ask("straggler", "scores", ask, RankScoreTable, job=job, within_s=30)
        assert table.is_by_time
        nodes.is_by_time = False
        nodes.send()
        (cleared,) = await said(bus, job, StragglerCleared, 1)
        assert isinstance(cleared, StragglerCleared)
        assert cleared.reason == "its steps are counted from here on"
        nodes.is_by_time = True
        nodes.send("n0")
        tracked = straggler.jobs.get(job)
        assert tracked is not None
        await until_async(
            lambda: tracked.refused["counted by others"],
            "both are refused",
            holds=lambda count: count == 2,
        )
        nodes.round = 2
        nodes.send("n0")
        await found(bus, job, 0)


class _LongJudge(SimpleJudge):
    """Its windows of a job with this name take until the test has seen enough."""

    LONG = "long"
    enough = Event()

    def close_due(self, now: float) -> list[Change]:
        if self.job.startswith(self.LONG) and self._heard:
            assert self.enough.wait(120)
        return super().close_due(now)


async def test_other_jobs_go_on_while_a_large_window_is_judged(bus: NatsBus, job: str) -> None:
    """A window of 100 000 ranks takes seconds: not those of others, and one at a time (A6.4)."""
    long = f"{_LongJudge.LONG}-{job}"
    _LongJudge.enough.clear()
    async with at_work(bus, make_judge=_LongJudge) as straggler:
        try:
            slow, quick = Nodes(bus, long), Nodes(bus, job)
            slow.send("n1")
            await until_async(
                lambda: (it := straggler.jobs.get(long)) and it.work.lock.locked(),
                "the large window is judged",
            )
            slow.send()
            quick.send("n1")
            await found(bus, job, 1)
            table = await bus.ask(
                "straggler", "scores", ShowScores(job=job), RankScoreTable, job=job, within_s=30
            )
            assert [one.rank for one in table.ranks] == [1, 0]
            assert (await document(bus, long) or blank_document(long)).found == ()
        finally:
            _LongJudge.enough.set()
        await said(bus, long, StragglerFound, 1)
        await said(bus, long, StragglerCleared, 1)


@pytest.mark.parametrize(("every_s", "reports"), [(60.0, 3), (0.0, 0)])
async def test_a_report_comes_at_an_interval_only_while_timings_do(
    caplog: pytest.LogCaptureFixture, every_s: float, reports: int
) -> None:
    caplog.set_level(logging.INFO)
    clock, bus = FakeClock(), MemoryBus(MemoryServer())
    settings = msgspec.structs.replace(QUICK, report_every_s=every_s, tick_s=1.0)
    async with at_work(bus, settings, clock) as straggler:
        nodes = Nodes(bus, "j")
        for second in range(300):
            if second < 130:
                nodes.send("n1")
            await clock.advance(1.0)
            if (tracked := straggler.jobs.get("j")) is not None:
                async with tracked.work.lock:
                    pass  # what threads do for the job takes none of the clock's time
    lines = [one for one in caplog.messages if one.startswith("rank_report job=j window=")]
    assert len(lines) == reports


async def test_it_runs_as_a_process_and_stops_when_asked(nats: DevServer, tmp_path: Path) -> None:
    settings = nats.settings(SERVICE)
    environment = {
        "EVERSTEP_BUS__URL": settings.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(settings.credentials_file),
        "EVERSTEP_BUS__SPOOL_DIR": str(tmp_path / "spool"),
        "EVERSTEP_OBSERVE__PORT": "0",
    }
    async with connect(settings, "look", spool=tmp_path / "look") as bus:
        await topology.init(bus.jetstream)
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "everstep_services.straggler"],
            env={**os.environ, **environment},
            stderr=asyncio.subprocess.PIPE,
        )
        nodes = Nodes(bus, "j")

        async def is_written() -> bool:
            nodes.send()
            return await document(bus, "j") is not None

        await until_async(is_written, "it has written how agents measure")
        process.terminate()
        _, told = await process.communicate()
    assert process.returncode == 0, told
