"""What each rank needed by itself: from its first entry to its last, without its waits."""

from dataclasses import dataclass

import numpy as np

from everstep_services.straggler.domain.arrays import (
    dense,
    medians_by,
    medians_of,
    middle_of_known,
    row_medians,
)
from everstep_services.straggler.domain.live.arrivals import Matched
from everstep_services.straggler.domain.operations import Array

_MOST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class RoleTable:
    """The segments of one role: a row a rank, a column a collective and what follows it."""

    rows: Array
    """The sample's rows."""
    entries: Array
    """The entry that each segment begins with; -1 for none. Rows × columns."""
    segments: Array
    """From the release of a collective to the next entry; NaN for none. Rows × columns."""
    usual: Array
    """By column: the median."""
    block: Array
    """By column: the step that it belongs to, from 0; -1 for those of incomplete steps."""
    blocks: int
    block_steps: float
    """How many steps a block is."""
    steps: float
    """How many steps the whole table is."""


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """By row of the sample; NaN where it is not known."""

    own_s: Array
    """In a step."""
    waited_s: Array
    """In a step."""
    late_s: Array
    """How late it enters operations, in the median: of the operation where it is the latest."""
    shared: Array
    """How many collectives in a step it waits in with ranks of other nodes."""
    tables: tuple[RoleTable, ...]

    def table_of(self, row: int) -> RoleTable | None:
        """The table that has a row of the sample."""
        return next((table for table in self.tables if row in table.rows), None)


def phases(matched: Matched, step_s: float) -> Array:
    """The place of each entry's collective in its step; 0 where steps have no fixed number."""
    span = np.bincount(matched.row, weights=matched.to_next_s)
    steps = np.median(span[span > 0]) / step_s if (span > 0).any() and step_s > 0 else 0.0
    if steps < 1.5:
        return np.zeros(len(matched.row), dtype=np.int64)
    width = np.zeros(int(matched.group.max()) + 1, dtype=np.int64)
    first = np.flatnonzero(np.r_[True, matched.row[1:] != matched.row[:-1]])
    rows = matched.row[first[:: max(1, len(first) // 64)]]
    at = np.isin(matched.row, rows)
    pair = matched.group[at].astype(np.int64) * (int(matched.row.max()) + 1) + matched.row[at]
    pairs, count = np.unique(pair, return_counts=True)
    group = pairs // (int(matched.row.max()) + 1)
    width[group] = np.rint(count / steps)
    near = np.abs(count / steps - width[group]) < 0.2 * np.maximum(width[group], 1)
    width[group[~near]] = 0
    each = width[matched.group]
    return np.where(each > 1, matched.sequence % np.maximum(each, 1), 0)


def own_times(matched: Matched, waits: Array, role: Array, step_s: float, rows: int) -> OwnTimes:
    """The time that each row needed by itself in a step, and what it waited for."""
    wait = np.where(waits, matched.last_s - matched.at_s, 0.0)
    to_next = matched.to_next_s
    span = np.bincount(matched.row, weights=to_next, minlength=rows)
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = np.where(span > 0, span / step_s if step_s > 0 else 1.0, np.nan)
        waited = np.bincount(matched.row, weights=wait, minlength=rows) / steps
        shared = waits & (matched.nodes[matched.cell] > 1)
        between = np.bincount(matched.row, weights=shared, minlength=rows) / steps
    own_s = np.full(rows, np.nan)
    tables = []
    segment = to_next - wait
    for number in range(int(role.max(initial=-1)) + 1):
        entries = np.flatnonzero(matched.leads & (role[matched.row] == number))
        if len(entries):
            table = _table(matched, entries, segment, steps)
            own_s[table.rows] = _own(table)
            tables.append(table)
    late = _lateness(matched, rows)
    return OwnTimes(own_s, waited, late, np.nan_to_num(between), tuple(tables))


def _table(matched: Matched, entries: Array, segment: Array, steps: Array) -> RoleTable:
    rows, row = np.unique(matched.row[entries], return_inverse=True)
    columns, column = np.unique(matched.column[entries], return_inverse=True)
    count = np.bincount(column)
    at = np.bincount(column, weights=matched.at_s[entries]) / count
    common = count * 2 >= len(rows)  # columns of few ranks are not comparable
    order = np.argsort(np.where(common, at, np.inf), kind="stable")
    place = np.empty(len(columns), dtype=np.int64)
    place[order] = np.arange(len(columns))
    wide = int(common.sum())
    kept = common[column]
    row, column, entries = row[kept], place[column[kept]], entries[kept]
    which = np.full((len(rows), wide), -1, dtype=np.int64)
    which[row, column] = entries
    values = np.full((len(rows), wide), np.nan)
    values[row, column] = segment[entries]
    usual = column_medians(values)
    partial = ~matched.is_whole[entries]
    if partial.any():
        _rebase(values, usual, matched.cell[entries], (row, column), partial)
    length = float(np.nanmedian(steps[rows])) if np.isfinite(steps[rows]).any() else 1.0
    block, blocks, each = _blocks(np.sort(at[common]), length)
    return RoleTable(rows, which, values, usual, block, blocks, each, length)


def _rebase(
    values: Array, usual: Array, cell: Array, place: tuple[Array, Array], partial: Array
) -> None:
    """Compare ranks of a group with missing members only with each other.

    The last rank to enter may be a missing one: then all others seem to be slow.
    """
    row, column = place[0][partial], place[1][partial]
    _, index = np.unique(cell[partial], return_inverse=True)
    values[row, column] += usual[column] - medians_of(index, values[row, column])


def _blocks(at: Array, steps: float) -> tuple[Array, int, float]:
    """The step that each column belongs to, how many steps there are, and how long each is."""
    wide = len(at)
    rate = wide / max(steps, 1e-9)
    width = round(rate)
    if width >= 1 and abs(rate - width) <= 0.03 * width and wide >= width:
        blocks = wide // width
        spare = wide - blocks * width
        return np.r_[np.full(spare, -1), np.repeat(np.arange(blocks), width)], blocks, 1.0
    if steps < 2 or wide < 4:
        return np.zeros(wide, dtype=np.int64), 1, steps
    blocks = int(min(steps, wide // 2, _MOST_BLOCKS))
    edges = np.linspace(at[0], at[-1], blocks + 1)[1:-1]
    return np.searchsorted(edges, at, side="right"), blocks, steps / blocks


def _own(table: RoleTable) -> Array:
    """What is usual in a step, and each row's excess over that: the mean of its middle half."""
    excess = table.segments - table.usual
    is_finite = np.isfinite(excess)
    used = table.block >= 0
    begins = np.flatnonzero(np.r_[True, np.diff(table.block[used]) != 0])
    sums = np.add.reduceat(np.where(is_finite, excess, 0.0)[:, used], begins, axis=1)
    share = np.add.reduceat(is_finite[:, used], begins, axis=1, dtype=np.int64)
    width = np.diff(np.r_[begins, int(used.sum())])
    sums[share * 2 <= width] = np.nan
    own_s: Array = np.nansum(table.usual) / table.steps + middle_of_known(sums) / table.block_steps
    return own_s


def column_medians(values: Array) -> Array:
    """The median of what is known of each column; NaN where nothing is."""
    gaps = np.isnan(values).any(axis=0)
    medians = np.full(values.shape[1], np.nan)
    if not gaps.all():
        medians[~gaps] = np.median(values[:, ~gaps], axis=0)
    if gaps.any():
        medians[gaps] = row_medians(values[:, gaps].T)
    return medians


def _lateness(matched: Matched, rows: int) -> Array:
    """By row; a rank that is late at the first of two collectives is not late at the second."""
    ops = int(matched.op.max(initial=0)) + 1
    cells, at = dense(matched.row * ops + matched.op)
    late = np.full(rows, -np.inf)
    np.maximum.at(late, cells // ops, medians_by(at, matched.late_s, len(cells)))
    return np.where(np.isfinite(late), late, np.nan)
