"""Measures each rank in one window: own time, waits, lateness, sections, scores."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everstep_services.straggler.domain import scores
from everstep_services.straggler.domain.arrays import (
    combined,
    finite_median,
    medians_by,
    medians_of,
)
from everstep_services.straggler.domain.changes import SlowRankFound
from everstep_services.straggler.domain.live.arrivals import Matched, Waits, matched, slack
from everstep_services.straggler.domain.live.clocks import (
    Alignment,
    NodeClocks,
    bounded,
    contradicted,
    without,
)
from everstep_services.straggler.domain.live.groups import Groups
from everstep_services.straggler.domain.live.own_times import OwnTimes, own_times, phases
from everstep_services.straggler.domain.live.samples import SIGNALS, Vocabulary
from everstep_services.straggler.domain.live.windows import Sample, Sections, sections_of
from everstep_services.straggler.domain.operations import Array

_WHOLE_STEP = ""
SILENT = "recorder silent"
"""An agent's word for a rank whose recorder did not answer."""
SPARED = "recorder spared"
"""An agent's word for a rank whose recorder it did not read in this window."""
_REASONS_MOST = 3


@dataclass(frozen=True, slots=True)
class Entered:
    """Entries into collectives, and the own times that they show."""

    entries: Matched
    waits: Array
    """Whether the rank waits in each entry for the last one."""
    own_times: OwnTimes


@dataclass(frozen=True, slots=True)
class Measured:
    """A window, measured: a row a rank of the sample."""

    sample: Sample
    step_s: float
    role: Array
    roles: tuple[str, ...]
    own_s: Array
    """In a step, without what an error of clocks may explain; NaN where it is not known."""
    waited_s: Array
    late_s: Array
    entered: Entered | None
    sections: Sections
    waits_inside: Array
    """Rows × sections: what the rank waits in collectives inside of each, in a step."""
    relative: Array
    """Rows × sections: NVRx's score against the fastest rank."""
    individual: Array
    """Rows × sections: NVRx's score against the rank's own best window."""
    gpu_relative: Array
    """NVRx's score of the kernels against the fastest rank of each; NaN without kernels."""
    gpu_individual: Array
    """The same against the rank's own best medians."""
    clock_error_s: float | None
    missing: str
    ops: tuple[str, ...]
    """The names of operations."""
    silent: Array
    """Ranks whose recorder did not answer while others waited: their own time is that wait."""

    def signal(self, name: str) -> Array:
        """A signal of the operating system or the driver, by row."""
        values: Array = self.sample.signals[:, SIGNALS[name]]
        return values

    def per_step(self, name: str) -> Array:
        """A signal over the steps of the window, by row."""
        values: Array = self.signal(name) / np.maximum(self.sample.steps, 1)
        return values

    def finding(self, number: int, row: int, **about: Any) -> SlowRankFound:
        """The finding about the rank of a row; its first step is the window's unless given."""
        sample = self.sample
        node = sample.nodes[int(sample.node[row])]
        about.setdefault("first_step", sample.first_step)
        return SlowRankFound(
            round=number,
            rank=int(sample.rank[row]),
            node=node.node,
            slot=node.slot,
            role=self.roles[int(self.role[row])],
            last_step=sample.last_step,
            **about,
        )

    @property
    def own_sections_s(self) -> Array:
        """Rows × sections: in a step, without waits inside."""
        own_s: Array = self.sections.wall_s - self.waits_inside
        return own_s

    @property
    def own_device_s(self) -> Array:
        """The same on the device, where that is known."""
        own_s: Array = self.sections.device_s - self.waits_inside
        return own_s


@dataclass(slots=True)
class Meter:
    """What is learned of a round from window to window, to measure the next one."""

    world: int
    names: Vocabulary
    refused: Counter[str]
    groups: Groups = field(init=False)
    clocks: NodeClocks = field(default_factory=NodeClocks)
    waits: Waits = field(default_factory=Waits)
    declared: Array = field(init=False)
    usual: Array = field(init=False)
    """Of each rank its own time in the last window in which all recorders answered."""
    trips: Array = field(init=False)
    """Of each rank the round trips in its last window."""
    seen: Array = field(init=False)
    """The ranks with data."""
    best: dict[int, Array] = field(default_factory=dict)
    """By section: the lowest median of each rank so far."""
    best_kernels: dict[int, Array] = field(default_factory=dict)
    """The same by kernel."""

    def __post_init__(self) -> None:
        self.groups = Groups(self.world)
        self.declared = np.full(self.world, -1, dtype=np.int32)
        self.usual = np.full(self.world, np.nan)
        self.trips = np.full(self.world, np.nan)
        self.seen = np.zeros(self.world, dtype=bool)

    def measure(self, sample: Sample) -> Measured:
        """Measure a window, and learn from it."""
        self.seen[sample.rank] = True
        self._forget_old_trips(sample)
        has_role = sample.role >= 0
        self.declared[sample.rank[has_role]] = sample.role[has_role]
        self.groups.learn(sample, self.names.groups.names(), self.names.ops.names())
        ranks = np.flatnonzero(self.seen)
        by_rank, roles = self.groups.roles(ranks, self.declared[ranks], self.names.roles.names())
        role = by_rank[np.searchsorted(ranks, sample.rank)]
        step_s = finite_median(sample.step_s)
        sections = sections_of(sample, self.names.sections.names())
        entered, alignment = self._entered(sample, role, step_s)
        own_s = self._own(sample, role, sections, entered, alignment)
        own_s, silent = self._with_silent(sample, role, own_s)
        nothing = np.full(len(sample.rank), np.nan)
        gpu = self._kernels(sample)
        return Measured(
            sample=sample, step_s=step_s, role=role, roles=tuple(roles), own_s=own_s,
            waited_s=nothing if entered is None else entered.own_times.waited_s,
            late_s=nothing if entered is None else entered.own_times.late_s,
            entered=entered, sections=sections,
            waits_inside=_waits_inside(sample, sections, entered),
            relative=scores.relative_section_scores(sections.medians),
            individual=self._individual(sample, sections),
            gpu_relative=gpu[0],
            gpu_individual=gpu[1],
            clock_error_s=_clock_error(entered, alignment), missing=_unknown(sample, own_s),
            ops=tuple(str(name) for name in self.names.ops.names()), silent=silent,
        )  # fmt: skip

    def _forget_old_trips(self, sample: Sample) -> None:
        """Leave out round trips that are as before: nothing was sent on these connections."""
        column = SIGNALS["round_trip_s"]
        now, before = sample.signals[:, column].copy(), self.trips[sample.rank]
        sample.signals[now == before, column] = np.nan
        self.trips[sample.rank] = now

    def _entered(
        self, sample: Sample, role: Array, step_s: float
    ) -> tuple[Entered | None, Alignment]:
        alignment = self.clocks.align(sample.nodes)
        entries = matched(sample, alignment, self.groups)
        if entries is None:
            return None, alignment
        waits = self.waits.learn(entries, phases(entries, step_s))
        if len(sample.nodes) > 1:
            entries, waits, alignment = self._checked(sample, entries, waits, alignment, step_s)
        times = own_times(entries, waits, role, step_s, len(sample.rank))
        return Entered(entries, waits, times), alignment

    def _checked(
        self, sample: Sample, entries: Matched, waits: Array, alignment: Alignment, step_s: float
    ) -> tuple[Matched, Array, Alignment]:
        """The same with clocks that the collectives do not contradict."""
        nodes = len(sample.nodes)
        room = slack(entries, waits, sample.node, nodes)
        wrong = contradicted(alignment, room.ahead_s, room.behind_s)
        if wrong.any():
            self.refused["clock that was set"] += int(wrong.sum())
            alignment = without(alignment, wrong)
            entries = matched(sample, alignment, self.groups) or entries
            waits = self.waits.in_entries(entries, phases(entries, step_s))
            room = slack(entries, waits, sample.node, nodes)
        return entries, waits, bounded(alignment, room.ahead_s, room.behind_s)

    def _own(
        self, sample: Sample, role: Array, sections: Sections, entered: Entered | None,
        alignment: Alignment,
    ) -> Array:  # fmt: skip
        """What each row needed by itself; NaN where it is not known."""
        own_s = np.full(len(sample.rank), np.nan)
        if entered is not None:
            shared = entered.own_times.shared
            margin = np.zeros(len(shared))
            np.multiply(alignment.error_s[sample.node], shared, out=margin, where=shared > 0)
            own_s = _beyond_clocks(entered.own_times.own_s, role, sample.node, margin)
        for number in range(int(role.max(initial=-1)) + 1):
            rows = np.flatnonzero(role == number)
            if np.isfinite(own_s[rows]).sum() * 2 < len(rows):
                measured = _by_sections(sections, rows)
                own_s[rows] = np.nan if measured is None else measured
        return own_s

    def _with_silent(self, sample: Sample, role: Array, own_s: Array) -> tuple[Array, Array]:
        """Own times with those of ranks that are too starved to say when they came.

        Where a rank was not seen in a collective, the waits of the others count as their work. What
        all of them need more than when that rank still answered is their wait for it.
        """
        own_s, silent = own_s.copy(), np.zeros(len(own_s), dtype=bool)
        usual, unheard = self.usual[sample.rank], _unheard(sample) & np.isnan(own_s)
        for number in range(int(role.max(initial=-1)) + 1):
            rows = np.flatnonzero(role == number)
            gone = rows[unheard[rows] & np.isfinite(usual[rows])]
            others = rows[np.isfinite(own_s[rows] + usual[rows])]
            if not len(gone):
                self.usual[sample.rank[rows]] = np.where(
                    np.isfinite(own_s[rows]), own_s[rows], usual[rows]
                )
            elif len(gone) * 2 < len(others):
                more = max(0.0, float(np.median(own_s[others] - usual[others])))
                own_s[others] -= more
                own_s[gone], silent[gone] = usual[gone] + more, more > 0
        return own_s, silent

    def _individual(self, sample: Sample, sections: Sections) -> Array:
        medians = sections.medians.astype(np.float32)
        individual, lowest = scores.individual_section_scores(
            medians, self._lowest(self.best, sections.numbers, sample)
        )
        self._keep(self.best, sections.numbers, sample, lowest)
        return individual

    def _kernels(self, sample: Sample) -> tuple[Array, Array]:
        """NVRx's scores of the device, relative and individual, of each row."""
        part = sample.kernels[sample.kernels[:, 1] >= 0]
        if not len(part):
            nothing = np.full(len(sample.rank), np.nan)
            return nothing, nothing
        numbers, column = np.unique(part[:, 1].astype(np.int64), return_inverse=True)
        medians, counts, averages = np.full((3, len(sample.rank), len(numbers)), np.nan)
        for table, values in ((counts, 2), (medians, 3), (averages, 4)):
            table[part[:, 0].astype(np.int64), column] = part[:, values]
        names = [str(name) for name in self.names.kernels.names()]
        kernels = [names[int(number)] for number in numbers]
        relative = scores.relative_gpu_scores(medians, counts, averages, kernels)
        individual, lowest = scores.individual_gpu_scores(
            medians, counts, averages, kernels, self._lowest(self.best_kernels, numbers, sample)
        )
        self._keep(self.best_kernels, numbers, sample, lowest)
        return relative, individual

    def _lowest(self, best: dict[int, Array], numbers: Array, sample: Sample) -> Array:
        lowest = np.full((len(sample.rank), len(numbers)), np.nan)
        for column, number in enumerate(numbers):
            if int(number) in best:
                lowest[:, column] = best[int(number)][sample.rank]
        return lowest

    def _keep(self, best: dict[int, Array], numbers: Array, sample: Sample, lowest: Array) -> None:
        for column, number in enumerate(numbers):
            if int(number) not in best:
                best[int(number)] = np.full(self.world, np.nan, dtype=np.float32)
            best[int(number)][sample.rank] = lowest[:, column]


def _by_sections(sections: Sections, rows: Array) -> Array | None:
    """The processor's or the device's time of whole steps, if all of these rows have it."""
    if _WHOLE_STEP not in sections.names or not len(rows):
        return None
    column = sections.names.index(_WHOLE_STEP)
    for times in (sections.device_s, sections.cpu_s):
        values: Array = times[rows, column]
        if np.isfinite(values).all() and (values > 0).all():
            return values
    return None


def _unheard(sample: Sample) -> Array:
    """The rows whose recorder was asked, and did not answer."""
    answers = np.bincount(sample.entry_row, minlength=len(sample.rank))
    if not (answers == 0).any() or not answers.any():
        return np.zeros(len(sample.rank), dtype=bool)
    asked = np.isin(sample.rank, [rank for rank, gap in sample.gaps.items() if SILENT in gap])
    unheard: Array = asked & (answers == 0)
    return unheard


def _unknown(sample: Sample, own_s: Array) -> str:
    """Which ranks cannot be compared, and why: those of one reason together, the most first."""
    unknown = np.flatnonzero(np.isnan(own_s)).tolist()
    if not unknown:
        return ""
    gaps = sample.gaps
    entered = np.bincount(sample.entry_row, minlength=len(own_s)) > 0
    by_reason: dict[str, list[int]] = {}
    for row in unknown:
        seen = "too few of its collectives were seen on other ranks, too"
        why = gaps[int(sample.rank[row])] or (seen if entered[row] else "no collective was seen")
        by_reason.setdefault(why, []).append(row)
    most = sorted(by_reason.items(), key=lambda pair: -len(pair[1]))
    return "; ".join(
        f"{_ranks_in_words(sample, rows)} cannot be compared: {why}"
        for why, rows in most[:_REASONS_MOST]
    )


def _ranks_in_words(sample: Sample, rows: list[int]) -> str:
    if len(rows) == 1:
        return f"rank {int(sample.rank[rows[0]])}"
    nodes = set(sample.node[rows].tolist())
    of = f" of {sample.nodes[nodes.pop()].node}" if len(nodes) == 1 else ""
    return f"{len(rows)} ranks{of}"


def _beyond_clocks(own_s: Array, role: Array, node: Array, margin: Array) -> Array:
    """Own times without what an error of a node's clock may explain.

    A clock that is wrong moves all ranks of its node: only what they have in common is cut.
    """
    if not margin.any():
        return own_s
    usual = medians_by(*_finite(role, own_s), int(role.max()) + 1)
    pair = combined(role, node)
    pairs = int(pair.max()) + 1
    shift = medians_by(*_finite(pair, own_s), pairs)[pair] - usual[role]
    most = medians_of(pair, margin)
    within: Array = own_s - np.clip(np.nan_to_num(shift), -most, most)
    return within


def _finite(keys: Array, values: Array) -> tuple[Array, Array]:
    is_finite = np.isfinite(values)
    return keys[is_finite], values[is_finite]


def _waits_inside(sample: Sample, sections: Sections, entered: Entered | None) -> Array:
    rows, wide = len(sample.rank), len(sections.numbers)
    if entered is None or not wide:
        return np.zeros((rows, wide))
    entries = entered.entries
    column = np.searchsorted(sections.numbers, entries.section)
    column[column == wide] = 0
    inside = entered.waits & (sections.numbers[column] == entries.section)
    at = np.flatnonzero(inside)
    cell = entries.row[at].astype(np.int64) * wide + column[at]
    waits = np.bincount(cell, weights=(entries.last_s - entries.at_s)[at], minlength=rows * wide)
    total = np.bincount(entries.row, weights=entries.to_next_s, minlength=rows)
    steps = total / finite_median(sample.step_s)
    whole: Array = waits.reshape(rows, wide) / np.where(steps > 0, steps, np.nan)[:, None]
    if _WHOLE_STEP in sections.names:
        whole[:, sections.names.index(_WHOLE_STEP)] = entered.own_times.waited_s
    return np.nan_to_num(whole)


def _clock_error(entered: Entered | None, alignment: Alignment) -> float | None:
    if entered is None or not entered.own_times.shared.any():
        return None
    worst = float(alignment.error_s.max())
    return worst if np.isfinite(worst) else None
