"""What is collected is kept, or has a reason: whatever the store of evidence says."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from everstep.bus.errors import BusRefusedError
from everstep.clock import Clock, SystemClock
from everstep.evidence.archive import ArchiveMember
from everstep.messages import BlobRef, ErrorRecord, EvidenceCollected, Fact, RankExited
from everstep_services.agent.collectors.collection import Collector, EvidenceFound, Piece, Scene
from everstep_services.agent.collectors.registry import Collectors
from everstep_services.agent.core.actions import StopRound
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.output.log_files import LogFiles
from everstep_services.agent.ranks.protocol import RankSeen
from everstep_services.agent.ranks.round_watch import RoundWatch
from everstep_services.agent.runtime import urgent_work
from everstep_services.agent.runtime.workdir import Workdir
from everstep_services.agent.telemetry.evidence import (
    Collections,
    EvidenceCollection,
    EvidenceRecorder,
)
from everstep_services.agent.telemetry.facts import AgentFacts
from tests.fakes.bus import MemoryBlobs, MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock
from tests.unit.agent.orders import start
from tests.unit.agent.run_plans import BUS, plan
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import map_page
from trainer_sdk.page import make_page

LOST = RankExit(code=1, error=ErrorRecord(name="RuntimeError", text="Connection closed by peer"))
ABORTED = RankExit(signal="SIGABRT")


class FullBlobs(MemoryBlobs):
    """Refuses this number of pieces, as a store that is full does."""

    def __init__(self, times: int) -> None:
        super().__init__(MemoryServer())
        self.times = times
        self.asked = 0

    async def put(self, job: str, data: bytes) -> BlobRef:
        self.asked += 1
        if self.asked <= self.times:
            raise BusRefusedError("a blob", 10077, "maximum bytes exceeded")
        return await super().put(job, data)


class FullBus(MemoryBus):
    """A bus with such a store."""

    def __init__(self, times: int) -> None:
        super().__init__(MemoryServer())
        self.full = FullBlobs(times)

    @property
    def blobs(self) -> FullBlobs:
        return self.full


async def kept(times: int) -> tuple[EvidenceCollected, FullBlobs]:
    clock, bus = FakeClock(), FullBus(times)
    facts: asyncio.Queue[Fact] = asyncio.Queue()
    records = AgentFacts("j", "n1", clock)
    collections = Collections("j", bus, records, facts.put_nowait, clock)
    collections.collected(1, "i1", [Piece("log", EvidenceFound("the end", b"text"), rank=3)])
    loops = [
        asyncio.create_task(loop())
        for loop in (collections.collect_for_ever, collections.collect_later_for_ever)
    ]
    try:
        async with asyncio.timeout(30):
            while facts.empty():
                await clock.advance(1.0)
            fact = facts.get_nowait()
    finally:
        for loop in loops:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
    assert isinstance(fact, EvidenceCollected)
    return fact, bus.full


async def test_a_store_that_is_full_is_asked_once_more_and_the_fact_says_so() -> None:
    """No loop, and a reason instead of the piece (A4.4)."""
    fact, blobs = await kept(times=100)
    assert blobs.asked == 2
    assert fact.blob is None
    assert "maximum bytes exceeded" in fact.missing


async def test_a_store_that_refuses_for_a_moment_keeps_it_later() -> None:
    fact, _ = await kept(times=1)
    assert (fact.rank, fact.missing) == (3, "")
    assert fact.blob is not None


def written(home: Path) -> Workdir:
    run = plan(home, *BUS, "--log-dir", str(home), "--job", "j", "train.py")
    workdir = Workdir(run, home, {}, None)
    for rank in range(2):
        workdir.logs.make(1, rank)
        workdir.logs.file(1, rank, "stderr").write_text(f"the end of rank {rank}\n")
    return workdir


async def recorded(home: Path, tell: Callable[[EvidenceRecorder], None]) -> list[Fact]:
    """The facts about ranks 0 and 1, which have both written to their logs."""
    clock, facts = FakeClock(), list[Fact]()
    workdir = await asyncio.to_thread(written, home)
    records = AgentFacts("j", "n1", clock)
    recorder = EvidenceRecorder(
        "j", MemoryBus(MemoryServer()), records, facts.append, clock, workdir
    )
    tell(recorder)
    loop = asyncio.create_task(recorder.collect_for_ever())
    try:
        await recorder.finish(30.0)
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
    return facts


@pytest.mark.parametrize(("survive", "evidence_s"), [(True, 0.9), (False, 0.9), (True, 5.0)])
async def test_after_a_crash_ranks_that_survive_park_while_their_evidence_is_collected(
    tmp_path: Path, *, survive: bool, evidence_s: float
) -> None:
    """All others are gone afterwards; and after a stall the stacks are wanted as they are."""
    may_end = asyncio.Event()

    async def slow(*_: object) -> EvidenceFound:
        await may_end.wait()
        return EvidenceFound("seen")

    workdir = await asyncio.to_thread(written, tmp_path)
    records, clock = AgentFacts("j", "n1", FakeClock()), FakeClock()
    bus = MemoryBus(MemoryServer())
    recorder = EvidenceRecorder("j", bus, records, lambda _: None, clock, workdir)
    collection = EvidenceCollection(
        recorder, Collectors({"slow": slow}, {}, {}, {}), workdir, clock
    )
    page = make_page(str(tmp_path / "page"))
    words = map_page(str(tmp_path / "page"))
    words[layout.SURVIVES], words[layout.PHASE] = int(survive), layout.PHASE_SCRIPT
    words[layout.MAGIC_AT] = layout.MAGIC
    ranks = (RankSeen(0, 0, page, tmp_path, is_gone=True), RankSeen(1, 7, page, tmp_path))
    watch = cast("RoundWatch", SimpleNamespace(seen=lambda: ranks, began_s=0.0))
    stop = StopRound(1, 3.0, evidence_s, "i1", keeps=(1,))
    beside = asyncio.create_task(recorder.collect_beside_for_ever())
    before = asyncio.create_task(collection.before_stop(stop, "i1", None, watch))
    await asyncio.wait([before], timeout=0 if not survive or evidence_s > 1 else None)
    assert before.done() == (survive and evidence_s < 1)
    next_round = asyncio.create_task(collection.of_kept())
    await asyncio.wait([next_round], timeout=0)
    assert next_round.done() != before.done()
    may_end.set()
    await asyncio.gather(before, next_round)
    beside.cancel()


def logs_of(facts: list[Fact]) -> list[tuple[str, int | None]]:
    return [(it.incident, it.rank) for it in facts if isinstance(it, EvidenceCollected)]


async def test_the_log_of_each_rank_that_fails_while_its_round_is_stopped_is_kept(
    tmp_path: Path,
) -> None:
    """A4.1: the rank that was heard last may be the cause, and only its log tells why."""

    def tell(recorder: EvidenceRecorder) -> None:
        recorder.rank_exited(start(), 0, 70, LOST, 5)
        recorder.belongs_to(1, 0, "i1")
        recorder.round_stops(1, "i1")
        recorder.rank_exited(start(), 1, 71, ABORTED, 5)

    facts = await recorded(tmp_path, tell)
    assert logs_of(facts) == [("i1", 0), ("i1", 1)]
    assert [it.incident for it in facts if isinstance(it, RankExited)] == ["i1", "i1"]


async def test_the_log_of_rank_0_is_kept_once_where_it_failed_before_it_was_stopped(
    tmp_path: Path,
) -> None:
    """It may hang as it exits, and is killed (A4.1)."""

    def tell(recorder: EvidenceRecorder) -> None:
        recorder.rank_exited(start(), 0, 70, LOST, 5)
        recorder.round_stops(1, "i1")
        recorder.round_stopped(start(), "i1", (0, 1))

    assert logs_of(await recorded(tmp_path, tell)) == [("i1", 0)]


async def test_the_log_of_rank_0_is_kept_once_where_it_is_reaped_after_it_was_stopped(
    tmp_path: Path,
) -> None:
    """A4.1: the same piece of evidence does not stand twice in the record."""

    def tell(recorder: EvidenceRecorder) -> None:
        recorder.round_stops(1, "i1")
        recorder.round_stopped(start(), "i1", (0, 1))
        recorder.rank_exited(start(), 0, 70, LOST, 5)

    facts = await recorded(tmp_path, tell)
    assert logs_of(facts) == [("i1", 0)]
    (exit_,) = [it for it in facts if isinstance(it, RankExited)]
    (piece,) = [it for it in facts if isinstance(it, EvidenceCollected)]
    assert exit_.log == piece.blob


@pytest.mark.parametrize("suspect", [1, None])
async def test_the_log_of_a_stalled_rank_and_any_with_a_traceback_is_kept(
    tmp_path: Path, suspect: int | None
) -> None:
    """A thread of the rank ended by an exception, and the rank waits for the thread for ever."""

    def tell(recorder: EvidenceRecorder) -> None:
        if suspect is None:
            traceback = "Traceback (most recent call last):\nValueError: 9\n"
            LogFiles(tmp_path, "j").file(1, 1, "stderr").write_text(traceback)
        recorder.round_stops(1, "i1")
        recorder.round_stopped(start(), "i1", (0, 1), suspect)

    assert logs_of(await recorded(tmp_path, tell)) == [("i1", 0), ("i1", 1)]


async def test_a_failure_that_was_heard_before_the_stop_belongs_to_it(tmp_path: Path) -> None:
    """Rendezvous may answer the report of one rank only (A4.1)."""

    def tell(recorder: EvidenceRecorder) -> None:
        recorder.rank_exited(start(), 0, 70, LOST, 5)
        recorder.round_stops(1, "i1")

    assert logs_of(await recorded(tmp_path, tell)) == [("i1", 0)]


async def test_a_rank_that_ended_well_and_a_rank_of_the_next_round_are_no_part_of_it(
    tmp_path: Path,
) -> None:
    def tell(recorder: EvidenceRecorder) -> None:
        recorder.rank_exited(start(), 0, 70, RankExit(code=0), 5)
        recorder.round_stops(1, "i1")
        recorder.rank_exited(start(), 1, 71, RankExit(code=0), 5)
        recorder.rank_exited(start(2), 0, 72, ABORTED, 5)

    facts = await recorded(tmp_path, tell)
    assert logs_of(facts) == []
    assert {it.incident for it in facts if isinstance(it, RankExited)} == {None}


class Watch:
    """The ranks of a round, of which some are gone once it has stopped."""

    began_s = 0.0

    def __init__(self, folder: Path) -> None:
        self._folder, self._page = folder, make_page(str(folder / "page"))
        self.gone: set[int] = set()

    def seen(self) -> tuple[RankSeen, ...]:
        return tuple(
            RankSeen(rank, 0 if gone else 9, self._page, self._folder, gone)
            for rank in (0, 1, 2)
            for gone in [rank in self.gone]
        )


async def test_a_recorder_that_was_not_read_in_time_is_read_where_its_rank_has_left_it(
    tmp_path: Path,
) -> None:
    """Rank 0 was read; rank 1 has ended by an exception meanwhile; rank 2 has left nothing."""
    member = ArchiveMember(0, "json", b"{}")

    async def slow(scene: Scene, _: Clock) -> EvidenceFound:
        return EvidenceFound("rank 0", members=(member,), missing={1: "late", 2: "late"})

    clock, kept = SystemClock(), list[Piece]()
    watch = await asyncio.to_thread(Watch, tmp_path)
    bus = MemoryBus(MemoryServer())

    class Recorder(EvidenceRecorder):
        def collected(self, round: int, incident: str, pieces: Sequence[Piece]) -> None:
            kept.extend(pieces)

    workdir = await asyncio.to_thread(written, tmp_path)
    recorder = Recorder("j", bus, AgentFacts("j", "n1", clock), lambda _: None, clock, workdir)
    table = Collectors({"flight_recorder": slow}, {}, {}, {})
    collection = EvidenceCollection(recorder, table, workdir, clock)
    stop, round_ = StopRound(1, 0.1, 0.3, "i1"), cast("RoundWatch", watch)
    await collection.before_stop(stop, "i1", start(1), round_)
    for rank in 0, 1:
        left = tmp_path / f"{layout.FLIGHT_PREFIX}{rank}"
        await asyncio.to_thread(left.write_bytes, b'{"entries": []}')
    watch.gone = {0, 1, 2}
    collection.after_stop(stop, "i1", start(1), round_)
    loop = asyncio.create_task(recorder.collect_beside_for_ever())
    await recorder.finish(30.0)
    loop.cancel()
    assert [piece.ranks for piece in kept] == [{0}, {1}]
    assert {piece.evidence for piece in kept} == {"flight_recorder"}


@pytest.mark.parametrize("begins", [True, False])
async def test_what_outlives_the_ranks_is_collected_when_the_next_ranks_run(
    *, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the next ranks wait for it, nor does a job that is over wait for next ranks."""
    monkeypatch.setattr(urgent_work, "_AT_MOST_S", 600.0)
    clock, facts, order = FakeClock(), asyncio.Queue[Fact](), list[str]()
    records = AgentFacts("j", "n1", clock)
    bus = MemoryBus(MemoryServer())
    collections = Collections("j", bus, records, facts.put_nowait, clock)

    def kind(name: str) -> Collector:
        async def collected(scene: Scene, _: Clock) -> EvidenceFound:
            order.append(name)
            return EvidenceFound("a line", b"text")

        return collected

    urgent_work.begin_urgent_work()
    for name, is_urgent in ("kernel_log", False), ("gpu", True):
        collections.collect(1, "i1", {name: kind(name)}, Scene((), 10.0), is_urgent=is_urgent)
    async with asyncio.TaskGroup() as tasks:
        loops = [
            tasks.create_task(loop())
            for loop in (collections.collect_beside_for_ever, collections.collect_for_ever)
        ]
        await facts.get()
        order.append("next ranks run" if begins else "the job is over")
        if begins:
            urgent_work.end_urgent_work()
            await facts.get()
        else:
            await collections.finish(30.0)
        for loop in loops:
            loop.cancel()
    assert order == ["gpu", "next ranks run" if begins else "the job is over", "kernel_log"]
