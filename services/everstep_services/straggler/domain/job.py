"""A live job: takes windows of nodes, and returns which ranks became slow or keep up again.

Pure: no I/O and no clock. The same messages give the same changes on any machine.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from everstep.messages import (
    HeatMapPart,
    KnownStraggler,
    NodeTimings,
    RankScoreTable,
    ShowHeatMap,
    ShowTimings,
    TimingTable,
)
from everstep_services.straggler.domain.changes import Change, Cost, KeepsUp
from everstep_services.straggler.domain.live import answers
from everstep_services.straggler.domain.live.measures import Meter
from everstep_services.straggler.domain.live.round import LiveRound
from everstep_services.straggler.domain.live.samples import MOST_WORLD
from everstep_services.straggler.domain.live.windows import Windows
from everstep_services.straggler.domain.rules import LiveRules

_MOST_WINDOW_STEPS = 1 << 20


class JobJudge:
    """The ranks of one job, in its newest round."""

    def __init__(self, job: str, rules: LiveRules) -> None:
        self.job = job
        self.rules = rules
        """May be replaced at any time."""
        self.refused: Counter[str] = Counter()
        """Messages and values that were refused, by reason."""
        self._round: LiveRound | None = None
        self._past: LiveRound | None = None
        """The round that is over, until another one begins: people still look at it."""
        self._ended = -1
        """The newest round that is over."""
        self._adopted: list[KnownStraggler] = []
        """Findings of a round without any data yet."""
        self._pending: list[Change] = []
        self._window_steps: int | None = None

    @property
    def round(self) -> int | None:
        """The newest round with data."""
        return None if self._round is None else self._round.number

    def hear(self, timings: NodeTimings, now: float) -> None:
        """Take in a node's window."""
        newest = self._ended if self._round is None else self._round.number
        if timings.round < newest or timings.round <= self._ended:
            self.refused["stale round"] += 1
            return
        if timings.job != self.job:
            self.refused["another job"] += 1
            return
        if self._round is None or timings.round > newest:
            if not 0 < timings.world <= MOST_WORLD:
                self.refused["absurd round"] += 1
                return
            self._begin(timings)
        assert self._round is not None
        if timings.world != self._round.meter.world:
            self.refused["another world"] += 1
            return
        self._round.windows.take(timings, now)

    def _begin(self, timings: NodeTimings) -> None:
        if self._round is not None:
            self._pending += self._leave(f"round {timings.round} began")
        windows = Windows(timings.round, self.refused)
        meter = Meter(timings.world, windows.names, self.refused)
        self._past = None
        self._round = LiveRound(timings.round, windows, meter, self.refused)
        for straggler in self._adopted:
            if straggler.round == timings.round:
                self._round.adopt(straggler)
            elif straggler.round < timings.round:
                self._pending.append(_over(straggler, f"round {timings.round} began"))
        self._adopted = []

    def close_due(self, now: float) -> list[Change]:
        """Judge the windows that are complete or overdue. Returns what changed."""
        changes, self._pending = self._pending, []
        if self._round is not None:
            for window in self._round.windows.due(now, self.rules.grace_s):
                changes += self._round.close(window, self.rules)
        return changes

    def end(self, reason: str) -> list[Cost | KeepsUp]:
        """End the job or its round. Returns the ranks that were slow until then, and their cost."""
        kept = [change for change in self._pending if isinstance(change, Cost | KeepsUp)]
        self._pending = []
        return [*kept, *self._leave(reason)]

    def _leave(self, reason: str) -> list[Cost | KeepsUp]:
        judged = self._round
        gone: list[Cost | KeepsUp] = [_over(straggler, reason) for straggler in self._adopted]
        self._adopted = []
        self._round = None
        if judged is None:
            return gone
        self._past = judged
        self._ended = max(self._ended, judged.number)
        gone += judged.costs.tell(is_over=True)
        gone += [KeepsUp(judged.number, rank, reason) for rank in judged.slow()]
        return [
            *gone,
            *(KeepsUp(judged.number, rank, reason, is_design=True) for rank in judged.uneven()),
        ]

    def adopt(self, stragglers: Iterable[KnownStraggler]) -> None:
        """Take over findings that another replica made."""
        for straggler in stragglers:
            if self._round is None:
                self._adopted.append(straggler)
            elif straggler.round == self._round.number:
                self._round.adopt(straggler)

    def window_steps(self, window_s: float) -> int | None:
        """How many steps last about `window_s`, as a power of two; None before any measurement."""
        newest = None if self._round is None else self._round.newest
        if newest is None or not newest.step_s > 0 or not window_s > 0:
            return self._window_steps
        wanted = math.log2(window_s / newest.step_s)
        settled = self._window_steps
        # An answer that is right by three quarters of a power stays: it must not flap.
        if settled is None or abs(wanted - math.log2(settled)) > 0.75:
            steps = 2 ** max(0, round(wanted))
            self._window_steps = min(steps, _MOST_WINDOW_STEPS)
        return self._window_steps

    def scores(self, most: int, role: str) -> RankScoreTable:
        """How the ranks compare in the newest window, the slowest `most` of them."""
        if self._round is None:
            return answers.no_scores()
        return answers.score_table(self._round, most, role)

    def timings(self, question: ShowTimings) -> TimingTable:
        """A measure of ranks by windows, also after the end of the round."""
        shown = self._round or self._past
        if shown is None:
            return TimingTable(round=0, measure=question.measure, windows=(), rows=())
        return answers.timing_table(shown, question)

    def heat_map_part(self, question: ShowHeatMap, most_ranks: int) -> HeatMapPart:
        """The same as a picture: as many ranks as a message holds, and at most `most_ranks`."""
        shown = self._round or self._past
        if shown is None:
            return HeatMapPart(
                round=0, measure=question.measure, windows=(), first_rank=0, nodes=(), low=0.0,
                high=0.0, cells="",
            )  # fmt: skip
        return answers.heat_map_part(shown, question, most_ranks)

    def summary(self) -> Mapping[str, float]:
        """Gauges of the newest window."""
        return answers.gauges(self._round)


def _over(straggler: KnownStraggler, reason: str) -> KeepsUp:
    is_design = straggler.cause == "design"
    return KeepsUp(straggler.round, straggler.rank, reason, is_design=is_design)
