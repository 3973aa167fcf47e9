"""The ranks and process groups of a trace that the verdict finds, with the cause of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from everstep.slow_rank_causes import SlowRankCause
from everstep_services.straggler.domain.arrays import combined, dense, medians_by
from everstep_services.straggler.domain.dependencies import Trace
from everstep_services.straggler.domain.operations import Array, OperationKind
from everstep_services.straggler.domain.own_time import OwnTime
from everstep_services.straggler.domain.verdict import (
    Cleared,
    Found,
    SlownessLimits,
    VerdictState,
    Window,
    compare,
    middle,
    observe,
)
from everstep_services.straggler.domain.whatif import Decomposed

_LEAST_STEPS = 4
_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TraceSuspect:
    """A rank, or the ranks of a group, as indexes into the trace's ranks."""

    kind: Literal["rank", "group"]
    ranks: tuple[int, ...]
    cause: SlowRankCause
    ratio: float
    lost_s: float
    confidence: float
    first_step: int
    """An index into the trace's steps."""
    last_step: int
    cleared: bool
    reason: str
    rows: Array
    """Of a group: its transfers, and those of its siblings."""
    peer_rows: Array


@dataclass(frozen=True, slots=True)
class SlowRanks:
    suspects: tuple[TraceSuspect, ...]
    ratios: Array
    """Ranks × windows."""


@dataclass(frozen=True, slots=True)
class Spell:
    """One time for which a subject was slow."""

    start: Found
    first: int
    """Windows."""
    last: int
    cleared: bool


def spells(windows: Sequence[Window], limits: SlownessLimits) -> list[Spell]:
    """Run the verdict over all windows. Spells in the order in which they were found."""
    return _followed(windows, limits)[0]


def _followed(windows: Sequence[Window], limits: SlownessLimits) -> tuple[list[Spell], Array]:
    """The spells, and the ratios of all subjects: windows × subjects."""
    state = VerdictState()
    open_: dict[int, Found] = {}
    done: list[Spell] = []
    ratios: list[Array] = []
    for window in windows:
        ratios.append(compare(window, limits, state).ratios)
        state, changes = observe(state, window, limits)
        for change in changes:
            match change:
                case Found():
                    open_[change.subject] = change
                case Cleared():
                    start = open_.pop(change.subject)
                    slow = [row[change.subject] >= start.ratio / 2 for row in ratios]
                    last = max(np.flatnonzero(slow), default=start.window)
                    done.append(Spell(start, start.since, int(last), cleared=True))
    last = windows[-1].number if windows else 0
    done += [Spell(start, start.since, last, cleared=False) for start in open_.values()]
    return sorted(done, key=lambda spell: (spell.first, spell.start.subject)), np.array(ratios)


def windows_of(own_s: Array, role: Array, width: int) -> Iterator[Window]:
    """Means of the middle half of `width` steps each; the last one may have more."""
    count = max(1, len(own_s) // width)
    for number in range(count):
        last = len(own_s) if number == count - 1 else (number + 1) * width
        rows = own_s[number * width : last]
        yield Window(number, np.arange(own_s.shape[1]), middle(rows.T), role)


def slow_ranks(own_time: OwnTime, role: Array, width: int, limits: SlownessLimits) -> SlowRanks:
    """Ranks that need more time of their own than the others of their role."""
    spans, ratios = _followed(list(windows_of(own_time.total_s, role, width)), limits)
    every = [_rank(spell, spans, own_time, role, width, limits) for spell in spans]
    suspects = [suspect for suspect in every if suspect is not None]
    by_rank: dict[int, TraceSuspect] = {}
    for suspect in suspects:  # of several spells the worst, over the whole time
        before = by_rank.get(suspect.ranks[0])
        by_rank[suspect.ranks[0]] = (
            suspect if before is None or suspect.ratio > before.ratio else before
        )
    return SlowRanks(tuple(by_rank.values()), ratios.T)


def _rank(
    spell: Spell,
    spells_: Sequence[Spell],
    own_time: OwnTime,
    role: Array,
    width: int,
    limits: SlownessLimits,
) -> TraceSuspect | None:
    """The rank; None if a few pauses alone made its windows slow, which may befall any rank."""
    rank = spell.start.subject
    span = slice(spell.first * width, _end(spell, width, len(own_time.steps)))
    peers = _peers(spell, spells_, role)
    excess = {
        cause: float(np.median(times[span, rank])) - _usual(times[span][:, peers])
        for cause, times in own_time.by_cause.items()
    }
    total = own_time.total_s[span]
    usual = _usual(total[:, peers])
    lost = float(np.median(total[:, rank])) - usual
    cause = max(excess, key=lambda cause_: excess[cause_])
    share = min(1.0, max(0.0, excess[cause] / lost)) if lost > 0 else 0.0
    ratio = lost / usual if usual > 0 else 0.0
    is_slow = total[:, rank] >= usual * (1 + ratio / 2)
    if ratio < limits.cleared_ratio or is_slow.sum() < min(_LEAST_STEPS, len(total)):
        return None
    return TraceSuspect(
        kind="rank",
        ranks=(rank,),
        cause=cause,
        ratio=ratio,
        lost_s=lost,
        confidence=_confidence(spell.start, ratio, limits) * share,
        first_step=int(own_time.steps[span.start]),
        last_step=int(own_time.steps[span.stop - 1]),
        cleared=spell.cleared,
        reason=_reason(spell, ratio, "own time", f"{int(peers.sum()) + 1} ranks", limits)
        + f"; {share * 100:.0f} % of it is {_WORDS[cause]}",
        rows=_NOTHING,
        peer_rows=_NOTHING,
    )


def _peers(spell: Spell, spells: Sequence[Spell], role: Array) -> Array:
    """The other ranks of its role; where half of these are slow at the same time, the rest."""
    rank = spell.start.subject
    peers: Array = (role == role[rank]) & (np.arange(len(role)) != rank)
    together = (
        other for other in spells if other.first <= spell.last and spell.first <= other.last
    )
    rest = peers & ~np.isin(np.arange(len(role)), [other.start.subject for other in together])
    is_most = 2 * rest.sum() <= peers.sum()
    return rest if is_most and rest.any() else peers


def _usual(times: Array) -> float:
    """Of steps × ranks: the median of the ranks' medians."""
    return float(np.median(np.median(times, axis=0)))


_WORDS = {
    "input": "input",
    "compute": "computation",
    "host": "time on the host, or outside of all operations",
    "unknown": "time between transfers, that the trace does not explain",
}


def _end(spell: Spell, width: int, steps: int) -> int:
    count = max(1, steps // width)
    return steps if spell.last >= count - 1 else (spell.last + 1) * width


def _confidence(change: Found, ratio: float, limits: SlownessLimits) -> float:
    """The confidence: one half at the limit, and towards 1 above it."""
    errors = ratio / max(change.noise_ratio, 1e-12)
    return float(1 - 0.5 ** (errors / dict(limits.horizons)[change.windows]))


def _reason(spell: Spell, ratio: float, excess: str, peers: str, limits: SlownessLimits) -> str:
    change = spell.start
    errors = dict(limits.horizons)[change.windows]
    limit = float(np.hypot(limits.found_ratio, errors * change.noise_ratio))
    return (
        f"{excess} {ratio * 100:.1f} % above the median of {peers}; found by "
        f"{change.ratio * 100:.1f} % over {change.windows} windows (limit {limit * 100:.1f} %, of "
        f"{limits.found_ratio * 100:g} % and {errors:g} standard errors of "
        f"{change.noise_ratio * 100:.2f} %)"
    )


# ---- transfers


_TRANSFER_RATIO = 0.25
"""Transfers vary more than computations: they are slow from this excess on."""
_LEAST_SHARE = 0.005
"""And from this loss of a step on: transfers that nobody waits for are not reported."""


@dataclass(frozen=True, slots=True)
class _Transfers:
    """The transfers of a trace, by process group or link."""

    parts: Decomposed
    rows: Array
    group: Array
    """Of each row, the number of its group."""
    role: Array
    """Of each group: equal for siblings."""
    own_s: Array
    """Steps × groups, of the steps that count."""
    steps: Array


def slow_groups(
    parts: Decomposed, steps: Array, width: int, limits: SlownessLimits
) -> tuple[TraceSuspect, ...]:
    """Process groups, or links, whose transfers take longer than those of their siblings."""
    trace = parts.trace
    rows = np.flatnonzero(
        (trace.kinds == OperationKind.COLLECTIVE) | (trace.kinds == OperationKind.RECEIVE)
    )
    rows = rows[(trace.collective[rows] >= 0) | (trace.partner[rows] >= 0)]
    if not len(rows):
        return ()
    group = _groups(trace, rows)
    count = int(group.max()) + 1
    role = _siblings(trace, rows, group, count)
    own_s = _transfer_times(parts, rows, group, count)[steps]
    transfers = _Transfers(parts, rows, group, role, own_s, steps)
    ratio = max(_TRANSFER_RATIO, limits.found_ratio)
    limits = replace(limits, found_ratio=ratio, cleared_ratio=ratio / 2)
    windows = list(windows_of(own_s, role, width))
    suspects = [_group(spell, transfers, width, limits) for spell in spells(windows, limits)]
    least = _LEAST_SHARE * float(np.median(parts.step_s))
    return tuple(_narrowed([suspect for suspect in suspects if suspect.lost_s >= least], trace))


def _groups(trace: Trace, rows: Array) -> Array:
    """A number for each row, equal for transfers of one name among the same ranks."""
    partner = trace.partner[rows]
    linked = partner >= 0
    members = np.zeros(len(rows), dtype=np.uint64)
    used = trace.collective[rows] >= 0
    marks = (trace.rank[rows].astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    marks ^= marks >> np.uint64(31)
    key = trace.collective[rows[used]]
    sums = np.zeros(int(key.max(initial=-1)) + 1, dtype=np.uint64)
    np.add.at(sums, key, marks[used])
    members[used] = sums[key]
    ends = trace.rank[rows] * (len(trace.ranks) + 1) + trace.rank[np.maximum(partner, 0)] + 1
    return combined(members, np.where(linked, ends, 0), trace.table.op[rows])


def _siblings(trace: Trace, rows: Array, group: Array, count: int) -> Array:
    """Groups of one name and size, which carry the same data."""
    op, size = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    op[group] = trace.table.op[rows]
    pairs = np.unique(np.c_[group, trace.rank[rows]], axis=0)
    np.add.at(size, pairs[:, 0], 1)
    return combined(op, size)


def _transfer_times(parts: Decomposed, rows: Array, group: Array, count: int) -> Array:
    """Steps × groups: what transfers took in a step, in the median of the members."""
    trace = parts.trace
    steps, ranks = len(trace.steps), len(trace.ranks)
    step = np.searchsorted(trace.steps, trace.table.step[rows])
    cells, at = dense((step * count + group) * ranks + trace.rank[rows])
    summed = np.bincount(at, weights=parts.work_s[rows])
    times = medians_by(cells // ranks, summed, steps * count)
    return times.reshape(steps, count)


def _group(spell: Spell, transfers: _Transfers, width: int, limits: SlownessLimits) -> TraceSuspect:
    trace, role = transfers.parts.trace, transfers.role
    subject = spell.start.subject
    siblings = np.flatnonzero((role == role[subject]) & (np.arange(len(role)) != subject))
    window = slice(spell.first * width, _end(spell, width, len(transfers.steps)))
    usual = float(np.nanmedian(transfers.own_s[window][:, siblings]))
    lost = float(np.nanmedian(transfers.own_s[window, subject])) - usual
    ratio = lost / usual if usual > 0 else 0.0
    mine = transfers.rows[transfers.group == subject]
    partner = trace.partner[mine]
    ranks = np.union1d(trace.rank[mine], trace.rank[partner[partner >= 0]])
    name = trace.table.ops[int(trace.table.op[mine[0]])]
    reason = _reason(spell, ratio, f"transfers ({name})", f"{len(siblings) + 1} groups", limits)
    return TraceSuspect(
        kind="group",
        ranks=tuple(int(rank) for rank in ranks),
        cause="network",
        ratio=ratio,
        lost_s=lost,
        confidence=_confidence(spell.start, ratio, limits),
        first_step=int(transfers.steps[window.start]),
        last_step=int(transfers.steps[window.stop - 1]),
        cleared=spell.cleared,
        reason=reason,
        rows=mine,
        peer_rows=transfers.rows[np.isin(transfers.group, siblings)],
    )


def _narrowed(suspects: list[TraceSuspect], trace: Trace) -> list[TraceSuspect]:
    """Several slow groups with one rank in common are one slow rank; a link has two directions."""
    by_ranks: dict[tuple[int, ...], list[TraceSuspect]] = {}
    for suspect in suspects:
        by_ranks.setdefault(suspect.ranks, []).append(suspect)
    counts = np.zeros(len(trace.ranks), dtype=np.int64)
    for ranks in by_ranks:
        counts[list(ranks)] += 1
    common = np.flatnonzero(counts == len(by_ranks))
    if len(by_ranks) > 1 and len(common) == 1:
        return [_as_one(suspects, (int(common[0]),), "groups have this rank in common")]
    return [
        _as_one(alike, ranks, "kinds of transfers are between these ranks")
        for ranks, alike in by_ranks.items()
    ]


def _as_one(suspects: Sequence[TraceSuspect], ranks: tuple[int, ...], common: str) -> TraceSuspect:
    worst = max(suspects, key=lambda suspect: suspect.ratio)
    if len(suspects) == 1:
        return worst
    return replace(
        worst,
        ranks=ranks,
        lost_s=sum(suspect.lost_s for suspect in suspects),
        first_step=min(suspect.first_step for suspect in suspects),
        last_step=max(suspect.last_step for suspect in suspects),
        cleared=all(suspect.cleared for suspect in suspects),
        reason=f"all {len(suspects)} slow {common}; {worst.reason}",
        rows=np.unique(np.concatenate([suspect.rows for suspect in suspects])),
        peer_rows=np.unique(np.concatenate([suspect.peer_rows for suspect in suspects])),
    )
