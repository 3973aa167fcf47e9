"""Straggler on a real bus: what it writes and records, once, whichever replica is there."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from threading import Event

import msgspec
import pytest

from everstep import ids, subjects
from everstep.bus import connect, topology
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError, SpoolFullError
from everstep.bus.server.dev_server import DevServer
from everstep.messages import (
    ClockReading,
    Fact,
    HeatMapPart,
    JobEnded,
    RankScoreTable,
    ReadClock,
    ShowHeatMap,
    ShowScores,
    ShowSwitches,
    ShowTimings,
    StragglerCleared,
    StragglerFound,
    StragglersDocument,
    SwitchTable,
    TimingTable,
    decode,
    decode_as,
    encode,
)
from everstep.messages.base import Question
from everstep_services.health.nodes.control import blank, switched
from everstep_services.straggler.domain.changes import Change
from everstep_services.straggler.domain.findings import blank as blank_document
from everstep_services.straggler.domain.job import Job
from everstep_services.straggler.rank_report import report_lines
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock
from tests.integration.straggler_replicas import (
    QUICK,
    Nodes,
    SimpleJudge,
    at_work,
    document,
    found,
    said,
    switch,
)
from tests.unit.straggler_windows import Delay, Simulation, Training
from tests.waiting import until_async


@pytest.fixture
async def bus(shared_nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    settings = shared_nats.settings(SERVICE)
    async with connect(settings, "straggler", spool=tmp_path / "spool") as bus:
        yield bus


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
            is_over = lambda one=tracked: not one.document.found  # noqa: E731
            await until_async(is_over, "both know that it is over")


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
        refused = lambda: straggler.statistics()["refused_total"]  # noqa: E731
        await until_async(refused, "both nodes are refused", holds=lambda count: count == 2)
        assert (await found(bus, job)).round == 2
    reasons = [
        one.reason
        for one in await said(bus, job, StragglerCleared, 2)
        if isinstance(one, StragglerCleared)
    ]
    assert reasons == ["its round ended", "its job ended"]


async def test_a_job_that_falls_silent_is_forgotten_with_what_was_found(
    bus: NatsBus, job: str
) -> None:
    nodes = Nodes(bus, job)
    settings = msgspec.structs.replace(QUICK, forget_after_s=0.5)
    async with at_work(bus, settings) as straggler:
        nodes.send("n1")
        (cleared,) = await said(bus, job, StragglerCleared, 1)
        gone = lambda: straggler.jobs.get(job) is None  # noqa: E731
        await until_async(gone, "the job is forgotten")
        assert await document(bus, job) is None
        assert isinstance(cleared, StragglerCleared)
        assert cleared.reason.startswith("nothing was heard of its job for")


async def test_agents_are_told_how_to_measure(bus: NatsBus, job: str) -> None:
    """Timings are switched off and on, and windows set, while it runs (A6.5)."""
    nodes = Nodes(bus, job)
    wait = partial(until_async, partial(document, bus, job), "agents are told")
    async with at_work(bus) as straggler:
        nodes.send("n1")
        await found(bus, job, 1)
        assert (await wait(holds=lambda it: it.window_steps == 100)).is_on
        fixed = switched(blank(), {"straggler.window_steps": "7", "straggler.cpu": "off"}, "a", "")
        await switch(bus, job, fixed)
        assert not (await wait(holds=lambda it: it.window_steps == 7)).is_cpu_timed
        off = switched(fixed, {"straggler.timings": "off"}, "a", "")
        await switch(bus, job, off)
        assert (await wait(holds=lambda it: not it.is_on)).found == ()
        nodes.send("n1")
        refused = lambda: straggler.statistics()["refused_total"]  # noqa: E731
        await until_async(refused, "windows that were on their way", holds=lambda n: n == 2)
        table = await bus.ask(
            "straggler", "scores", ShowScores(job=job), RankScoreTable, job=job, within_s=30
        )
        assert (table.is_on, table.window_steps) == (False, 7)
        assert table.said == "timings are off: switch on straggler.timings"
    async with at_work(bus):  # nobody sends anything: the document must do
        await switch(bus, job, fixed)
        await wait(holds=lambda it: it.is_on)
        nodes.send("n1")
        await found(bus, job, 1)


async def test_the_limit_of_a_finding_is_a_switch(bus: NatsBus, job: str) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus) as straggler:
        ratio = switched(blank(), {"straggler.slower_ratio": "3"}, "a", "")
        await switch(bus, job, ratio)
        nodes.send("n1")
        judged = lambda: straggler.statistics()["ratio_max"]  # noqa: E731
        await until_async(judged, "a window is judged", holds=lambda most: most == 1.0)
        assert (await found(bus, job)).found == ()
        nodes.send("n1", times=5.0)
        await found(bus, job, 1)


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


async def test_what_is_asked_is_answered_in_one_message(bus: NatsBus, job: str) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus):
        nodes.send("n1")
        await found(bus, job, 1)
        scores = await bus.ask(
            "straggler", "scores", ShowScores(job=job, most=1), RankScoreTable, job=job, within_s=30
        )
        assert [(one.rank, one.slower_ratio) for one in scores.ranks] == [(1, 1.0)]
        assert scores.window_steps == 100
        ask = ShowTimings(job=job, most_ranks=10**9, first_rank=-5)
        table = await bus.ask("straggler", "timings", ask, TimingTable, job=job, within_s=30)
        assert (len(table.rows), table.next_rank) == (1024, 1024), "halved until it fits"
        picture = ShowHeatMap(job=job, first_rank=3)
        part = await bus.ask("straggler", "heat_map", picture, HeatMapPart, job=job, within_s=30)
        assert (part.first_rank, part.next_rank, part.nodes[0].ranks) == (3, 16_387, 16_384)
        first, second = [
            await bus.ask(
                "straggler", "clock", ReadClock(job=job), ClockReading, job=job, within_s=30
            )
            for _ in range(2)
        ]
        assert first.clock == second.clock != ""
        assert second.at_s >= first.at_s > 1.7e9


@pytest.mark.parametrize(
    ("verb", "question", "said"),
    [
        ("scores", ShowScores(job="nobody"), "no timings of nobody were heard"),
        ("timings", ShowTimings(job="nobody"), "no timings of nobody were heard"),
        ("heat_map", ShowHeatMap(job="nobody"), "no timings of nobody were heard"),
    ],
)
async def test_a_job_that_is_not_known_is_refused_in_one_line(
    bus: NatsBus, verb: str, question: Question, said: str
) -> None:
    async with at_work(bus):
        with pytest.raises(AskRefusedError, match=said):
            await bus.ask("straggler", verb, question, RankScoreTable, job="nobody", within_s=30)


async def test_a_measure_that_is_not_known_is_refused(bus: NatsBus, job: str) -> None:
    async with at_work(bus) as straggler:
        Nodes(bus, job).send()
        await until_async(lambda: straggler.jobs.get(job), "the job is known")
        ask = ShowTimings(job=job, measure="mood")
        with pytest.raises(AskRefusedError, match="'mood' is not measured: use one of own, ratio"):
            await bus.ask("straggler", "timings", ask, TimingTable, job=job, within_s=30)


async def test_a_document_that_cannot_be_read_is_neither_followed_nor_written_over(
    bus: NatsBus, job: str
) -> None:
    documents = bus.documents("STRAGGLERS")
    await documents.put(job, b'{"type":"stragglers_document.v9"}', revision=None)
    other = f"{job}-other"
    async with at_work(bus):
        Nodes(bus, job).send("n1")
        Nodes(bus, other).send("n1")
        await found(bus, other, 1)
        assert (await documents.get(job)).data == b'{"type":"stragglers_document.v9"}'


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

    async with at_work(bus, make_judge=Job) as straggler:
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
    async with at_work(bus, make_judge=Job):
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
        refused = lambda: tracked.refused["counted by others"]  # noqa: E731
        await until_async(refused, "both are refused", holds=lambda count: count == 2)
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
            is_judged = lambda: (it := straggler.jobs.get(long)) and it.work.lock.locked()  # noqa: E731
            await until_async(is_judged, "the large window is judged")
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


class _FullBus(MemoryBus):
    """Its disk takes nothing until somebody makes room."""

    is_full = True

    async def record(self, fact: Fact) -> None:
        if self.is_full:
            raise SpoolFullError("full")
        await super().record(fact)


async def test_facts_wait_in_the_document_while_the_disk_is_full() -> None:
    server = MemoryServer()
    bus = _FullBus(server)

    async def outbox() -> int | None:
        seen = await bus.documents("STRAGGLERS").get("j")
        return None if seen.data is None else len(decode_as(seen.data, StragglersDocument).outbox)

    async with at_work(bus):
        Nodes(bus, "j").send("n1")
        await until_async(outbox, "the fact waits", holds=lambda count: count == 1)
        bus.is_full = False
        await until_async(outbox, "it is on record", holds=lambda count: count == 0)
    assert [type(decode(one.data)) for one in server.facts] == [StragglerFound]


@pytest.mark.parametrize(("every_s", "reports"), [(60.0, 3), (0.0, 0)])
async def test_a_report_comes_at_an_interval_only_while_timings_do(
    caplog: pytest.LogCaptureFixture, every_s: float, reports: int
) -> None:
    caplog.set_level(logging.INFO)
    clock, bus = FakeClock(), MemoryBus(MemoryServer())
    settings = msgspec.structs.replace(QUICK, report_every_s=every_s, tick_s=1.0)
    async with at_work(bus, settings, clock):
        nodes = Nodes(bus, "j")
        for second in range(300):
            if second < 130:
                nodes.send("n1")
            await clock.advance(1.0)
    lines = [one for one in caplog.messages if one.startswith("rank_report job=j window=")]
    assert len(lines) == reports


async def test_every_switch_is_told_with_its_source_by_whoever_is_asked(
    bus: NatsBus, job: str
) -> None:
    """Of a job of which nothing was heard, too (A6.5)."""
    await switch(bus, job, switched(blank(), {"straggler.stop_reports": "3"}, "ann", "r"))
    async with at_work(bus):
        question = ShowSwitches(job=job)
        of = SwitchTable
        table = await bus.ask("straggler", "switches", question, of, job=job, within_s=30)
    found = {one.name: (one.value, one.source) for one in table.switches}
    assert found["straggler.stop_reports"] == ("3", "control of the job")
    assert found["straggler.window_s"] == ("10", "default")


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
