"""What slow ranks cost: steps replayed with the segments of their peers, and sums to report."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from everstep_services.straggler.domain.changes import Cost
from everstep_services.straggler.domain.live.device_times import levels
from everstep_services.straggler.domain.live.measures import Entered
from everstep_services.straggler.domain.live.own_times import RoleTable
from everstep_services.straggler.domain.operations import Array

_MOST_PEERS = 256


@dataclass(frozen=True, slots=True)
class Price:
    """What a job loses because of some of its ranks."""

    slowdown_ratio: float
    """How much faster it would be without: 0.12 for 12 %."""
    lost_s: float
    """In a step."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The sampled collectives in an order in which each can be replayed."""

    entered: Entered
    order: Array
    """Entries by level and then by cell."""
    levels: Array
    """Where each level begins in `order`, and the end."""
    segment: Array
    """Of each entry: from its release to the rank's next entry."""
    first: Array
    """Of each entry: it is the first of its rank."""
    before_s: float
    """How long the steps took as they were."""

    def took_s(self, segment: Array) -> float:
        """How long the sampled steps take with these segments, by the ranks that take longest."""
        matched, waits = self.entered.entries, self.entered.waits
        release, over = np.zeros(len(segment)), np.zeros(len(segment))
        at = np.where(self.first, matched.at_s, 0.0)
        for begin, end in zip(self.levels[:-1], self.levels[1:], strict=True):
            rows = self.order[begin:end]
            later = rows[~self.first[rows]]
            at[later] = release[later - 1] + segment[later - 1]
            cell = matched.cell[rows]
            starts = np.flatnonzero(np.r_[True, cell[1:] != cell[:-1]])
            last = np.maximum.reduceat(at[rows], starts)
            over[rows] = np.repeat(last, np.diff(np.r_[starts, len(rows)]))
            release[rows] = np.where(waits[rows], over[rows], at[rows])
        return float(np.max(over[~matched.leads] - over[self.first]))


def replay_of(entered: Entered) -> Replay | None:
    """The replay of a window; None where its collectives have no common order."""
    matched = entered.entries
    level = levels(matched.row, matched.cell, int(matched.cell.max()) + 1)
    if level is None:
        return None
    order = np.lexsort((matched.cell, level))
    counts = np.bincount(level)
    wait = np.where(entered.waits, matched.last_s - matched.at_s, 0.0)
    first = np.r_[True, matched.row[1:] != matched.row[:-1]]
    before = float(np.max(matched.last_s[~matched.leads] - matched.last_s[first]))
    bounds = np.r_[0, np.cumsum(counts)]
    return Replay(entered, order, bounds, matched.to_next_s - wait, first, before)


def price(replay: Replay, rows: Sequence[int], slow: Sequence[int], steps: float) -> Price | None:
    """What the job loses by these rows; their peers are those of their role that are not slow."""
    segment = replay.segment.copy()
    for row in rows:
        table = replay.entered.own_times.table_of(row)
        if table is not None:
            _replace(segment, table, row, slow)
    before, after = replay.before_s, replay.took_s(segment)
    if not after > 0 or not steps > 0:
        return None
    return Price(before / after - 1, (before - after) / steps)


def estimate(
    own_s: Array, role: Array, rows: Sequence[int], slow: Sequence[int], step_s: float
) -> Price | None:
    """What the job loses because of these rows, where it is unknown which rank waits for which.

    What they have more than their peers, the most of each role.
    """
    lost: dict[int, float] = {}
    for row in rows:
        peers = (role == role[row]) & np.isfinite(own_s)
        peers[[row, *slow]] = False
        excess = float(own_s[row] - np.median(own_s[peers])) if peers.any() else 0.0
        number = int(role[row])
        lost[number] = max(lost.get(number, 0.0), excess)
    lost_s = min(sum(lost.values()), 0.95 * step_s)
    return Price(lost_s / (step_s - lost_s), lost_s) if step_s > 0 else None


def _replace(segment: Array, table: RoleTable, row: int, slow: Sequence[int]) -> None:
    """Give a row its peers' segments: the k-th longest of a kind becomes their k-th longest."""
    peers = np.flatnonzero(~np.isin(table.rows, [row, *slow]))
    peers = peers[:: max(1, len(peers) // _MOST_PEERS)]
    position = int(np.searchsorted(table.rows, row))
    if not len(peers):
        return
    for columns in _kinds(table):
        mine = table.segments[position, columns]
        is_finite = np.isfinite(mine)
        if not is_finite.any():
            continue
        others = np.sort(table.segments[np.ix_(peers, columns[is_finite])], axis=1)
        whole = others[np.isfinite(others).all(axis=1)]
        if not len(whole):
            continue
        usual = np.median(whole, axis=0)
        rank = np.argsort(np.argsort(mine[is_finite]))
        segment[table.entries[position, columns[is_finite]]] = usual[rank]


def _kinds(table: RoleTable) -> list[Array]:
    """Columns that are equal but for the step that they are in."""
    wide = len(table.usual)
    used = np.flatnonzero(table.block >= 0)
    each = len(used) // max(table.blocks, 1)
    if table.block_steps != 1.0 or each < 1 or each * table.blocks != len(used):
        return [np.arange(column, column + 1) for column in range(wide)]
    place = (np.arange(wide) - used[0]) % each
    return [np.flatnonzero(place == column) for column in range(each)]


_TOLD_AFTER = 6
"""Windows: each time the document is written, and all agents of the job read it."""

Finding = tuple[int, bool]
"""A rank, and whether it only stands for its role."""


@dataclass(slots=True)
class Costs:
    """Of one round."""

    round: int
    rates: dict[Finding, float] = field(default_factory=dict)
    """Of each open finding, what it cost a step in the last window in which that was measured."""
    _untold: dict[Finding, tuple[int, Cost]] = field(default_factory=dict)
    """The sums, and over how many windows."""

    def measure(
        self, steps: tuple[int, int], lost_s: Mapping[Finding, float], unknown: Collection[Finding]
    ) -> None:
        """Take in what a window's steps, from first to last, have lost in each step by findings.

        Unknown findings cost as much as when they were last measured; all others are over or new,
        and the cost of a new finding comes with it.
        """
        rates = {
            finding: self.rates[finding] for finding in unknown if finding in self.rates
        } | dict(lost_s)
        for finding, rate in rates.items():
            if finding in self.rates:
                self._add(finding, steps, rate)
        self.rates = rates

    def _add(self, finding: Finding, steps: tuple[int, int], rate: float) -> None:
        first, last = steps
        rank, is_design = finding
        cost = Cost(self.round, rank, is_design, first, last, rate * (last - first + 1))
        windows, before = self._untold.get(finding, (0, None))
        if before is not None:
            cost = replace(cost, first_step=before.first_step, lost_s=before.lost_s + cost.lost_s)
        self._untold[finding] = windows + 1, cost

    def tell(self, *, is_over: bool = False) -> list[Cost]:
        """Return the costs to report: at once for findings that are over, else occasionally."""
        due = [
            finding
            for finding, (windows, _) in self._untold.items()
            if is_over or finding not in self.rates or windows >= _TOLD_AFTER
        ]
        return [self._untold.pop(finding)[1] for finding in due]
