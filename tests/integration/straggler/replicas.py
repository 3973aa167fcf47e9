"""Replicas of straggler at work, and timings for them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median

from everstep import subjects
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskTimeoutError, BusError
from everstep.bus.ports import Bus
from everstep.clock import Clock, SystemClock
from everstep.messages import (
    ControlDocument,
    Fact,
    HeatMapPart,
    KnownStraggler,
    NodeRun,
    NodeTimings,
    RankScores,
    RankScoreTable,
    RankSpread,
    RankTiming,
    Score,
    ShowHeatMap,
    ShowScores,
    ShowTimings,
    StragglersDocument,
    TimingRow,
    TimingTable,
    decode_as,
    encode,
)
from everstep.runtime import Loop
from everstep_services.straggler.domain.changes import Change, KeepsUp
from everstep_services.straggler.domain.rules import LiveRules
from everstep_services.straggler.jobs import MakeJudge
from everstep_services.straggler.replica import Straggler
from everstep_services.straggler.settings import StragglerSettings
from tests.integration.health.replicas import facts_of
from tests.unit.straggler.changes import slow
from tests.waiting import until_async

QUICK = StragglerSettings(tick_s=0.02, report_every_s=0.0, takeover_s=0.5)
NODES = ("n0", "n1")


_RANKS_MOST = 20_000


class SimpleJudge:
    """Each node is a rank, and one window of all of them is enough: a rank is slow that takes that
    much longer than the median, and keeps up as soon as it does not.
    """

    def __init__(self, job: str, rules: LiveRules) -> None:
        self.job = job
        self.rules = rules
        self.refused: Counter[str] = Counter()
        self.round: int | None = None
        self._heard: dict[int, dict[int, NodeTimings]] = {}
        self._slow: set[int] = set()
        self._ratios: dict[int, float] = {}
        self._window = 0
        self._closed = 0
        self._steps: int | None = None

    def hear(self, timings: NodeTimings, now: float) -> None:
        if timings.round > (-1 if self.round is None else self.round):
            self.round, self._heard, self._slow = timings.round, {}, set()
        if timings.round == self.round:
            self._heard.setdefault(timings.last_step, {})[timings.slot] = timings
        else:
            self.refused["stale round"] += 1

    def close_due(self, now: float) -> list[Change]:
        changes: list[Change] = []
        for step, heard in sorted(self._heard.items()):
            if len(heard) == next(iter(heard.values())).slots:
                changes += self._close(step, self._heard.pop(step))
        return changes

    def _close(self, step: int, heard: Mapping[int, NodeTimings]) -> Iterable[Change]:
        taken = {slot: one.window_s for slot, one in heard.items()}
        self._closed += 1
        self._window, middle = step, median([*taken.values(), min(taken.values())])
        self._ratios = {slot: it / middle - 1 for slot, it in taken.items()}
        for slot, ratio in self._ratios.items():
            is_slow = ratio >= self.rules.limits.found_ratio
            if is_slow and slot not in self._slow:
                self._slow.add(slot)
                yield slow(
                    slot, self.round or 0, node=heard[slot].node, cause="host",
                    slower_ratio=ratio, last_step=step,
                )  # fmt: skip
            elif not is_slow and slot in self._slow:
                self._slow.discard(slot)
                yield KeepsUp(round=self.round or 0, rank=slot, reason="it keeps up")

    def end(self, reason: str) -> list[KeepsUp]:
        return [KeepsUp(self.round or 0, rank, reason) for rank in sorted(self._slow)]

    def adopt(self, found: Iterable[KnownStraggler]) -> None:
        self._slow |= {one.rank for one in found}

    def window_steps(self, window_s: float) -> int | None:
        return int(window_s * 10)

    def scores(self, most: int, role: str) -> RankScoreTable:
        ranks = [
            RankScores(
                rank=rank, node=f"n{rank}", slower_ratio=ratio,
                scores=(Score(signal="own", relative_score=1 / (1 + ratio)),),
            )
            for rank, ratio in sorted(self._ratios.items(), key=lambda pair: -pair[1])
        ]  # fmt: skip
        return RankScoreTable(
            round=self.round or 0, window=self._window, ranks=tuple(ranks[:most]), step_s=0.1,
            spreads=(RankSpread(name="score/own", values=(0.5, 0.9, 1.0)),),
        )  # fmt: skip

    def timings(self, question: ShowTimings) -> TimingTable:
        long = "x" * 500  # too much for one reply
        first, end = question.first_rank, question.first_rank + question.most_ranks
        rows = [TimingRow(rank=rank, node=long, role="", values=()) for rank in range(first, end)]
        return TimingTable(
            round=0, measure=question.measure, windows=(), rows=tuple(rows), next_rank=end
        )

    def heat_map_part(self, question: ShowHeatMap, most_ranks: int) -> HeatMapPart:
        after = question.first_rank + most_ranks
        return HeatMapPart(
            round=0, measure=question.measure, windows=((1, 16),), first_rank=question.first_rank,
            nodes=(NodeRun(node="x" * 500, ranks=most_ranks),), low=0.0, high=1.0,
            cells="AQAB" * most_ranks, next_rank=after if after < _RANKS_MOST else None,
        )  # fmt: skip

    def summary(self) -> Mapping[str, float]:
        most = max(self._ratios.values(), default=0.0)
        return {"windows": float(self._closed), "ratio_max": most}


@asynccontextmanager
async def at_work(
    bus: Bus,
    settings: StragglerSettings = QUICK,
    clock: Clock | None = None,
    make_judge: MakeJudge = SimpleJudge,
) -> AsyncIterator[Straggler]:
    """One replica, all of its loops running, its questions heard."""
    straggler = Straggler(settings, bus, clock or SystemClock(), make_judge)
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(_run(loop)) for loop in straggler.loops]
        try:
            await straggler.answers.open.wait()
            await until_async(lambda: straggler.observer._inbox, "timings are heard")
            yield straggler
        finally:
            for loop in loops:
                loop.cancel()


async def _run(loop: Loop) -> None:
    await loop()


class Nodes:
    """Nodes of one job, each with a rank, that send window after window."""

    def __init__(self, bus: Bus, job: str, names: Sequence[str] = NODES) -> None:
        self._bus = bus
        self.job = job
        self.names = names
        self.round = 1
        self.is_by_time = False
        self.first_rank = 0
        self._step = 0

    def leap(self, steps: int) -> None:
        """Count from a later step on."""
        self._step += steps

    def send(self, *slow: str, times: float = 2.0) -> None:
        """One window of each node; those named take a multiple of the time."""
        first, self._step = self._step + 1, self._step + 16
        for slot, name in enumerate(self.names):
            window_s = 1.6 * (times if name in slow else 1.0)
            timings = NodeTimings(
                job=self.job,
                node=name,
                round=self.round,
                slot=slot,
                slots=len(self.names),
                world=len(self.names),
                first_step=first,
                last_step=self._step,
                window_s=window_s,
                is_by_time=self.is_by_time,
                ranks=(RankTiming(rank=self.first_rank + slot, steps=16, window_s=window_s),),
            )
            self._bus.send(subjects.timing(self.job, name), timings)


async def document(bus: Bus, job: str) -> StragglersDocument | None:
    """How it stands with a job."""
    found = await bus.documents("STRAGGLERS").get(job)
    return None if found.data is None else decode_as(found.data, StragglersDocument)


async def switch(bus: Bus, key: str, control: ControlDocument) -> None:
    """Put switches of a job, or of all, in force."""
    await bus.documents("CONTROL").put(key, encode(control), revision=None)


FOUND = "the document says who is slow"


async def found(bus: NatsBus, job: str, *ranks: int) -> StragglersDocument:
    """The document, once it says that these ranks are slow, and all facts are on record."""

    def holds(seen: StragglersDocument) -> bool:
        return tuple(one.rank for one in seen.found) == ranks and not seen.outbox

    return await until_async(lambda: document(bus, job), FOUND, holds=holds)


async def said(bus: NatsBus, job: str, kind: type[Fact], count: int) -> list[Fact]:
    return list(await facts_of(bus, kind, count, job))


async def window_of(bus: Bus, job: str) -> int:
    """The newest window that some replica has judged; 0 while nobody answers."""
    question = ShowScores(job=job)
    try:
        table = await bus.ask(
            "straggler", "scores", question, RankScoreTable, job=job, within_s=1.0
        )
    except (BusError, AskTimeoutError):
        return 0
    return table.window


async def judged(bus: Bus, job: str, step: int) -> None:
    """Some replica has judged the windows up to this step."""
    await until_async(
        lambda: window_of(bus, job),
        f"windows are judged up to step {step}",
        holds=lambda last: last >= step,
    )
