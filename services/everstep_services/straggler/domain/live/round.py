"""One round of a job: its windows measured and judged, one after the other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from everstep.messages import KnownStraggler
from everstep_services.straggler.domain import verdict
from everstep_services.straggler.domain.changes import Change, KeepsUp, SlowRankFound
from everstep_services.straggler.domain.live.causes import Blame, blame, from_host
from everstep_services.straggler.domain.live.imbalance import Imbalance
from everstep_services.straggler.domain.live.links import (
    LINK_WINDOWS,
    Links,
    SlowNode,
    from_link,
    slow_sender,
)
from everstep_services.straggler.domain.live.measures import SPARED, Measured, Meter
from everstep_services.straggler.domain.live.price import (
    Costs,
    Finding,
    Price,
    Replay,
    estimate,
    price,
    replay_of,
)
from everstep_services.straggler.domain.live.samples import SHOWN_SIGNALS, Names
from everstep_services.straggler.domain.live.shift import Steps
from everstep_services.straggler.domain.live.windows import (
    Gathered,
    Kept,
    Sample,
    WindowHistory,
    Windows,
    joined,
)
from everstep_services.straggler.domain.operations import Array
from everstep_services.straggler.domain.rules import LiveRules
from everstep_services.straggler.domain.verdict import Cleared, Found, Slow, VerdictState

_KEPT_NUMBERS = 128
_ENOUGH = 0.6
"""A window with fewer of the known ranks than this share is shown, and not judged."""
_SPARED_MOST = 16


@dataclass(slots=True)
class LiveRound:
    """What is known of one round; bounded by its ranks."""

    number: int
    windows: Windows
    meter: Meter
    refused: Counter[str]
    state: VerdictState = field(default_factory=VerdictState)
    history: WindowHistory = field(default_factory=WindowHistory)
    newest: Measured | None = None
    """Of windows whose recorders agents have spared, the one before them."""
    spared: int = 0
    """How many windows followed the newest one without entries of all nodes."""
    slower: Array = field(default_factory=lambda: np.empty(0))
    """By rank, in the newest window: how much longer than the median of its role."""
    trips: Array = field(default_factory=lambda: np.empty(0))
    """By node of the newest window: round trips in the latest windows."""
    is_usual: Array = field(default_factory=lambda: np.empty(0, dtype=bool))
    """By rank, in the newest window: it is one of those that tell what is usual in its role."""
    closed: int = 0
    """Windows so far."""
    role_numbers: Names = field(default_factory=lambda: Names(1 << 16))
    first_steps: dict[int, int] = field(default_factory=dict)
    """Of the latest windows, by number."""
    named: dict[int, int] = field(default_factory=dict)
    """By slow subject: the rank that is reported instead, whose link holds the subject back."""
    links: Links = field(default_factory=Links)
    imbalance: Imbalance = field(default_factory=Imbalance)
    steps: Steps = field(init=False)
    replay: Replay | None = None
    """Of the newest window, once it is needed."""
    cost: Price | None = None
    """What all slow ranks cost, in the newest window."""
    costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        self.costs, self.steps = Costs(self.number), Steps(self.number)

    def close(self, window: Gathered, rules: LiveRules) -> list[Change]:
        """Measure and judge a window."""
        sample = joined(window, self.refused)
        if not len(sample.rank):
            return []
        shown = self._shown(sample)
        self.newest = self.replay = None  # these hold large arrays
        measured = self.meter.measure(sample)
        self.newest = measured
        self.closed += 1
        self.first_steps[self.closed] = window.first_step
        self.first_steps.pop(self.closed - _KEPT_NUMBERS, None)
        changes = [*self._judge(measured, rules), *self._links(measured, rules)]
        changes += self._shift(measured, rules)
        slow = self._slow_rows(measured)
        self.cost = self._price(measured, slow) if slow else None
        self._count(measured, slow)
        self._remember(measured, rules)
        if shown is not None:
            self.newest, self.slower, self.cost = shown
        return [*self.costs.tell(), *changes]

    def _shown(self, sample: Sample) -> tuple[Measured, Array, Price | None] | None:
        """The measures to show: those of an earlier window where this one lacks entries of nodes.

        Agents read large recorders in some windows only, at least in every sixteenth.
        """
        newest = self.newest
        had_entries = newest is not None and len(newest.sample.entry_row) > 0
        is_spared = any(SPARED in gap for node in sample.nodes for gap in node.gaps)
        self.spared = self.spared + 1 if is_spared or not len(sample.entry_row) else 0
        if newest is None or not had_entries or not 0 < self.spared < _SPARED_MOST:
            return None
        return newest, self.slower, self.cost

    def _judge(self, measured: Measured, rules: LiveRules) -> list[Change]:
        sample, world = measured.sample, self.meter.world
        own_s = np.full(world, np.nan)
        own_s[sample.rank] = measured.own_s
        role = np.full(world, -1, dtype=np.int64)
        numbers = [self.role_numbers.number(name) for name in measured.roles]
        role[sample.rank] = np.array(numbers, dtype=np.int64)[measured.role]
        window = verdict.Window(self.closed, np.arange(world), own_s, role)
        compared = verdict.compare(window, rules.limits, self.state)
        self.slower, self.is_usual = compared.ratios, compared.is_usual
        self.trips = self.links.hear(measured, own_s - own_s / (1 + self.slower))
        if len(sample.rank) < _ENOUGH * int(self.meter.seen.sum()):
            return []
        self.state, changed = verdict.observe(self.state, window, rules.limits)
        changes: list[Change] = []
        changes += self.imbalance.observe(self.number, measured, rules.uneven_ratio)
        for change in changed:
            match change:
                case Found():
                    changes += self._slow(change, measured, rules)
                case Cleared():
                    changes += self._cleared(change, sample.last_step)
        return changes

    def _slow(self, change: Found, measured: Measured, rules: LiveRules) -> list[Change]:
        row = named = int(np.searchsorted(measured.sample.rank, change.subject))
        why = blame(measured, row, change, rules.limits, self.is_usual[measured.sample.rank])
        why = from_host(why, self.links.held_back_s(change.subject))
        sender = slow_sender(measured, row, self.trips)
        if sender is not None:
            rank = int(measured.sample.rank[sender])
            is_known = rank in self.slow(besides=change.subject)
            self.named[change.subject] = rank
            if is_known:
                return []
            named, why = sender, from_link(measured, row, sender, self.trips, why)
        first = self.first_steps.get(change.since, measured.sample.first_step)
        slow_rank = _slow_rank(self.number, measured, named, change, why, first)
        rows = self._slow_rows(measured)
        every = self._price(measured, rows)
        cost = self._price(measured, [row]) if change.growth_ratio is None else every
        if cost is None or every is None:
            return [slow_rank]
        lost_s = dict(zip(rows, self._shares(measured, rows, every), strict=True))[row]
        return [replace(slow_rank, slowdown_ratio=cost.slowdown_ratio, lost_s=lost_s)]

    def _price(self, measured: Measured, rows: list[int]) -> Price | None:
        """What these rows cost the job; None where that cannot be replayed."""
        if measured.entered is None:
            return None
        if measured.entered.entries.is_transfer.any() or measured.silent[rows].any():
            slow = self._not_usual(measured)
            return estimate(measured.own_s, measured.role, rows, slow, measured.step_s)
        if self.replay is None:
            self.replay = replay_of(measured.entered)
        if self.replay is None:
            return None
        steps = float(np.nanmedian([table.steps for table in measured.entered.own_times.tables]))
        return price(self.replay, rows, self._not_usual(measured), steps)

    def _count(self, measured: Measured, slow: list[int]) -> None:
        """Count what each open finding cost in this window."""
        lost: dict[Finding, float] = {}
        finite = [row for row in slow if np.isfinite(measured.own_s[row])]
        for row, lost_s in zip(finite, self._shares(measured, finite, self.cost), strict=True):
            rank = int(measured.sample.rank[row])
            finding = self.named.get(rank, rank), False
            lost[finding] = lost.get(finding, 0.0) + lost_s
        for rank in self.links.slow_ranks.values():
            lost.setdefault((rank, False), self.links.lost_s)
        for rank, lost_s in self.imbalance.lost_s.items():
            lost[rank, True] = lost_s
        most = measured.step_s if measured.step_s > 0 else 0.0
        bounded = {finding: min(max(lost_s, 0.0), most) for finding, lost_s in lost.items()}
        unknown: list[Finding] = []
        if 0 < self.spared < _SPARED_MOST:
            unknown += [(rank, False) for rank in self.slow()]
            unknown += [(rank, True) for rank in self.uneven()]
        self.costs.measure(
            (measured.sample.first_step, measured.sample.last_step), bounded, unknown
        )

    def _shares(self, measured: Measured, rows: list[int], whole: Price | None) -> list[float]:
        """What these rows cost in a step, all together, in proportion to their excess."""
        if not rows:
            return []
        if whole is None:
            whole = estimate(measured.own_s, measured.role, rows, rows, measured.step_s)
        excess = np.maximum(self.slower[measured.sample.rank[rows]], 0.0) * measured.own_s[rows]
        total = float(np.nansum(excess))
        if len(rows) == 1 and whole is not None:
            return [whole.lost_s]
        if whole is None or not total > 0:
            return [0.0] * len(rows)
        return [whole.lost_s * share for share in np.nan_to_num(excess / total).tolist()]

    def _slow_rows(self, measured: Measured) -> list[int]:
        slow = list(self.state.slow)
        return [int(row) for row in np.flatnonzero(np.isin(measured.sample.rank, slow))]

    def _not_usual(self, measured: Measured) -> list[int]:
        """The rows of ranks that are slow, or became so without having been found yet."""
        rest = np.flatnonzero(~self.is_usual[measured.sample.rank])
        return sorted({*self._slow_rows(measured), *rest.tolist()})

    def _links(self, measured: Measured, rules: LiveRules) -> list[Change]:
        """Whose link or host slows the whole job, where no rank's own time shows it."""
        is_explained = bool(self.state.slow)
        slow_node, over = self.links.observe(measured, self.trips, rules.shift_ratio, is_explained)
        changes: list[Change] = [
            KeepsUp(self.number, rank, "its node's connections do as well as others', or steps too")
            for rank in over
            if rank not in self.slow()
        ]
        if slow_node is not None:
            changes.append(_slow_node(self.number, measured, slow_node))
        return changes

    def _shift(self, measured: Measured, rules: LiveRules) -> list[Change]:
        """Whether the whole job changed, where no rank explains it."""
        ahead = self.slower[np.isfinite(self.slower)]
        if (
            self.state.slow
            or self.links.slow_ranks
            or (len(ahead) and ahead.max() >= rules.shift_ratio / 2)
        ):
            self.steps.forget()
            return []
        walls = measured.own_sections_s
        sections = {
            name: float(np.median(finite))
            for column, name in enumerate(measured.sections.names)
            if name and len(finite := walls[:, column][np.isfinite(walls[:, column])])
        }
        first = measured.sample.first_step
        trips = measured.signal("round_trip_s")
        trip_s = float(np.nanmax(trips)) if np.isfinite(trips).any() else float("nan")
        shift = self.steps.add(first, measured.step_s, sections, trip_s, rules.shift_ratio)
        return [] if shift is None else [shift]

    def _cleared(self, cleared: Cleared, last_step: int) -> list[Change]:
        rank = self.named.pop(cleared.subject, cleared.subject)
        if rank in self.slow():
            return []
        reason = "it no longer sends anything"
        if cleared.ratio is not None and cleared.limit is not None:
            reason = (
                f"own time {cleared.ratio * 100:.1f} % above the median of its role, below the "
                f"limit of {cleared.limit * 100:.1f} %"
            )
        return [KeepsUp(self.number, rank, reason, last_step)]

    def adopt(self, straggler: KnownStraggler) -> None:
        """Take over a finding that another replica made."""
        if straggler.cause == "design":
            self.imbalance.adopt(straggler.rank)
            return
        if straggler.rank in self.state.slow or straggler.rank >= self.meter.world:
            return
        slow = Slow(since=self.closed, found=self.closed, horizon=3)
        self.state = replace(self.state, slow={**self.state.slow, straggler.rank: slow})

    def slow(self, besides: int = -1) -> Sequence[int]:
        """The ranks that are reported as slow, without those reported because of one subject."""
        subjects = (subject for subject in self.state.slow if subject != besides)
        named = {self.named.get(subject, subject) for subject in subjects}
        return sorted(named.union(self.links.slow_ranks.values()))

    def uneven(self) -> Sequence[int]:
        """The ranks that stand for roles that have too much to do."""
        return sorted({*self.imbalance.uneven.values(), *self.imbalance.adopted})

    def _remember(self, measured: Measured, rules: LiveRules) -> None:
        rank, world = measured.sample.rank, self.meter.world

        def spread(values: Array) -> Array:
            everywhere = np.full(world, np.nan, dtype=np.float32)
            everywhere[rank] = values
            return everywhere

        measures = {
            "own": spread(measured.own_s),
            "ratio": self.slower.astype(np.float32),
            "waited": spread(measured.waited_s),
            "step": spread(measured.sample.step_s),
        } | {name: spread(measured.per_step(of)) for name, of in SHOWN_SIGNALS.items()}
        measures["round_trip"] = spread(measured.signal("round_trip_s"))
        sections_s = measured.own_sections_s
        sections = {
            int(number): spread(sections_s[:, column])
            for column, number in enumerate(measured.sections.numbers)
        }
        kept = Kept(measured.sample.first_step, measured.sample.last_step, measures, sections)
        self.history.add(kept, rules.kept_windows)


def _slow_node(number: int, measured: Measured, slow_node: SlowNode) -> SlowRankFound:
    step_s, lost_s = slow_node.step_s, slow_node.lost_s
    reason = (
        f"steps take {step_s * 1e3:.1f} ms, {lost_s * 1e3:.1f} ms more than before, and "
        f"no rank's own time explains it; for {LINK_WINDOWS} windows, {slow_node.words}"
    )
    return measured.finding(
        number, slow_node.row, cause=slow_node.cause, reason=reason, section=None, scores=(),
        lateness_s=None, slower_ratio=0.0, lost_s=lost_s,
        slowdown_ratio=lost_s / (step_s - lost_s), windows=LINK_WINDOWS,
        confidence=slow_node.confidence,
    )  # fmt: skip


def _slow_rank(
    number: int, measured: Measured, row: int, change: Found, why: Blame, first_step: int
) -> SlowRankFound:
    late_s = float(measured.late_s[row])
    return measured.finding(
        number, row, cause=why.cause, reason=why.reason, section=why.section, scores=why.scores,
        lateness_s=late_s if np.isfinite(late_s) else None, slower_ratio=change.ratio,
        lost_s=why.lost_s, slowdown_ratio=None, windows=change.windows, confidence=why.confidence,
        first_step=first_step,
    )  # fmt: skip
