"""Who waits for whom: entries into collectives, matched across ranks, and which of them wait."""

from dataclasses import dataclass, field

import numpy as np

from everstep_services.straggler.domain.arrays import dense, means_by, medians_by
from everstep_services.straggler.domain.live.clocks import Alignment
from everstep_services.straggler.domain.live.device_times import device_times_us
from everstep_services.straggler.domain.live.groups import Groups
from everstep_services.straggler.domain.live.windows import Sample
from everstep_services.straggler.domain.operations import Array

_REACH = 4096
"""Sequence numbers of a group that are further from its median are not matched."""
_MOST_SAMPLES = 200_000
_MOST_KINDS = 64
"""Of groups: those of transfers are numbered from here on."""
_FEW_FULL = 0.25
"""With fewer complete collectives than this, incomplete ones are used, too."""


@dataclass(frozen=True, slots=True)
class Matched:
    """Entries that have partners, by row and then by time."""

    row: Array
    group: Array
    cell: Array
    """The number of the collective."""
    op: Array
    section: Array
    at_s: Array
    """On the common clock, from an arbitrary moment on."""
    last_s: Array
    """When the last rank entered the same collective; of a transfer, when the peer was there."""
    late_s: Array
    """How much later than the median of its members it was entered."""
    sequence: Array
    """The collective's number in its group."""
    column: Array
    """The number of the collective among those of its kind of group: equal for ranks that do
    the same in different groups."""
    is_whole: Array
    """All members of its group were seen in it."""
    leads: Array
    """Another entry of the same rank follows."""
    last_row: Array
    """By cell: the row that was the last to enter."""
    nodes: Array
    """By cell: how many nodes were in it, up to 2; 1 where no clock of a node was needed."""
    is_transfer: Array
    """It is alone in its cell: which send belongs to which receive is unknown."""
    is_timed: bool
    """Matched by the durations on devices."""

    @property
    def to_next_s(self) -> Array:
        """The time to the rank's next entry; 0 where none follows."""
        times = np.zeros(len(self.at_s))
        times[:-1] = np.where(self.leads[:-1], np.diff(self.at_s), 0.0)
        return times


def matched(sample: Sample, alignment: Alignment, groups: Groups) -> Matched | None:
    """Match the entries of a window; None where no two ranks were in one collective.

    Where devices tell how long most collectives lasted, by that; else by when they were entered.
    """
    has_group = sample.entry_group >= 0
    timed = sample.entry_lasted_us >= 0
    entered = has_group & ~sample.entry_is_transfer
    if entered.any() and (timed & entered).sum() * 2 > entered.sum():
        at = np.flatnonzero(has_group & timed)
        on_devices = _matched(sample, at, alignment, groups, is_timed=True)
        if on_devices is not None:
            return on_devices
    return _matched(sample, np.flatnonzero(entered), alignment, groups, is_timed=False)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The entries that are compared."""

    at: Array
    """Their indices in the sample."""
    row: Array
    group: Array
    cell: Array
    time_us: Array
    is_transfer: Array
    is_timed: bool


def _matched(
    sample: Sample, at: Array, alignment: Alignment, groups: Groups, *, is_timed: bool
) -> Matched | None:
    chosen = _chosen(sample, at, alignment, is_timed=is_timed)
    if chosen is None:
        return None
    row, group, cell, time_us = chosen.row, chosen.group, chosen.cell, chosen.time_us
    cells = int(cell.max()) + 1
    cell_group = np.full(cells, -1, dtype=np.int32)
    cell_group[cell] = group
    order = np.argsort((cell.astype(np.int64) << 40) | time_us)
    count = np.bincount(cell, minlength=cells)
    used, whole = _used(count, cell_group, groups)
    used[cell[chosen.is_transfer]] = whole[cell[chosen.is_transfer]] = True
    last, waited_us, late_us = _waited(sample, chosen, order, count)
    valid = np.flatnonzero(used[cell])
    if not len(valid):
        return None
    # Durations on devices need only the device's own clock, so no clock can be wrong.
    nodes = count.clip(max=1) if is_timed else _nodes(sample.node[row], cell, count, order)
    own_order = np.argsort((row[valid].astype(np.int64) << 40) | time_us[valid], kind="stable")
    by_time = valid[own_order]
    own_cell, own_row, is_transfer = cell[by_time], row[by_time], chosen.is_transfer[by_time]
    sequence = sample.entry_sequence[chosen.at[by_time]]
    return Matched(
        row=own_row,
        group=group[by_time],
        cell=own_cell,
        op=sample.entry_op[chosen.at[by_time]],
        section=sample.entry_section[chosen.at[by_time]],
        at_s=time_us[by_time] / 1e6,
        last_s=(time_us + waited_us)[by_time] / 1e6,
        late_s=late_us[by_time] / 1e6,
        sequence=sequence,
        column=_columns(groups.kind[group[by_time]] + is_transfer * _MOST_KINDS, sequence),
        is_whole=whole[own_cell],
        leads=np.r_[own_row[1:] == own_row[:-1], False],
        last_row=row[last],
        nodes=nodes,
        is_transfer=is_transfer,
        is_timed=is_timed,
    )


def _chosen(sample: Sample, at: Array, alignment: Alignment, *, is_timed: bool) -> _Chosen | None:
    if not len(at):
        return None
    keep, cell, cells = _cells(sample.entry_group[at], sample.entry_sequence[at])
    at, cell = at[keep], cell[keep]
    if not len(at):
        return None
    row, is_transfer = sample.entry_row[at], sample.entry_is_transfer[at]
    time_us = _aligned(sample, at, cell, alignment)
    cell[is_transfer] = cells + np.arange(is_transfer.sum())
    if is_timed:
        device_us = device_times_us(row, cell, time_us, sample.entry_lasted_us[at])
        if device_us is None:
            return None
        time_us = np.clip(device_us, 0, (1 << 40) - 1)
    return _Chosen(at, row, sample.entry_group[at], cell, time_us, is_transfer, is_timed)


def _waited(
    sample: Sample, chosen: _Chosen, order: Array, count: Array
) -> tuple[Array, Array, Array]:
    """The last entry of each cell, and of each entry how long it waits, and how late it is."""
    cell, time_us, is_transfer = chosen.cell, chosen.time_us, chosen.is_transfer
    first = np.cumsum(count) - count
    seen = np.flatnonzero(count)
    last, median = np.zeros(len(count), dtype=np.int64), np.zeros(len(count), dtype=np.int64)
    last[seen] = order[(first + count - 1)[seen]]
    median[seen] = order[(first + count // 2)[seen]]
    waited_us = time_us[last[cell]] - time_us
    late_us = time_us - time_us[median[cell]]
    if is_transfer.any():
        waited_us[is_transfer] = _beyond_shortest(sample, chosen.at[is_transfer])
        late_us[is_transfer] = -waited_us[is_transfer]
    return last, waited_us, late_us


def _beyond_shortest(sample: Sample, at: Array) -> Array:
    """Return each transfer's wait: its duration minus the shortest of its kind."""
    lasted, (kinds, kind) = sample.entry_lasted_us[at], dense(sample.entry_op[at])
    shortest = np.full(len(kinds), np.iinfo(np.int64).max)
    np.minimum.at(shortest, kind, lasted)
    waited: Array = lasted - shortest[kind]
    return waited


@dataclass(frozen=True, slots=True)
class Slack:
    """How long after the last entry other ranks go on, where a node is last and where it is not.

    Below zero the clocks contradict the collectives: no rank goes on before the last has entered.
    """

    ahead_s: Array
    """By node: where it is the last one, how soon the others go on after it. NaN for none."""
    behind_s: Array
    """By node: how soon it goes on after the last one of another node. NaN for none."""


def slack(matched: Matched, waits: Array, node: Array, nodes: int) -> Slack:
    """How the collectives agree with the nodes' clocks, in the median."""
    node_of_row, last = node[matched.row], node[matched.last_row[matched.cell]]
    at = np.flatnonzero(waits & (node_of_row != last))
    at = at[:: len(at) // _MOST_SAMPLES | 1]
    after = matched.at_s[at] + matched.to_next_s[at] - matched.last_s[at]
    ahead = medians_by(last[at], after, nodes)
    trusted = at[~(ahead[last[at]] < 0)]
    later = matched.at_s[trusted] + matched.to_next_s[trusted] - matched.last_s[trusted]
    return Slack(ahead, medians_by(node_of_row[trusted], later, nodes))


def _cells(group: Array, sequence: Array) -> tuple[Array, Array, int]:
    """Which entries are within reach of their group's others, their cells, and their number."""
    distinct, index = dense(group)
    starts = np.flatnonzero(np.r_[True, (np.diff(index) != 0) | (np.diff(sequence) != 1)])
    usual = medians_by(index[starts], sequence[starts].astype(np.float64), len(distinct))
    low = usual.astype(np.int64) - _REACH
    place = sequence - low[index]
    keep = (place >= 0) & (place < 2 * _REACH)
    least = np.full(len(distinct), 2 * _REACH, dtype=np.int64)
    most = np.full(len(distinct), -1, dtype=np.int64)
    np.minimum.at(least, index[keep], place[keep])
    np.maximum.at(most, index[keep], place[keep])
    width = np.maximum(most - least + 1, 0)
    first = np.cumsum(width) - width
    return keep, first[index] + place - least[index], int(width.sum())


def _aligned(sample: Sample, at: Array, cell: Array, alignment: Alignment) -> Array:
    """Instants on one clock in microseconds, from the earliest one on."""
    node = sample.node[sample.entry_row[at]]
    us = sample.entry_us[at]
    since = us - alignment.at_us[node]
    is_finite = np.isfinite(alignment.offset_s)
    offset_us = np.where(is_finite, alignment.offset_s, 0.0) * 1e6
    time = us - (offset_us[node] + alignment.drift[node] * since).astype(np.int64)
    if len(is_finite) > 1 and not is_finite.all():
        # Nodes with unknown clocks are shifted until they are not late in the median.
        trusted = is_finite[node] if is_finite.any() else np.ones(len(node), dtype=bool)
        middle = medians_by(cell[trusted], time[trusted].astype(np.float64), int(cell.max()) + 1)
        with np.errstate(invalid="ignore"):
            apart = time - middle[cell]
        rows = np.isfinite(apart)
        guess = np.nan_to_num(medians_by(node[rows], apart[rows], len(is_finite)))
        time = time - np.where(is_finite, 0.0, guess)[node].astype(np.int64)
    shifted: Array = np.clip(time - int(np.median(time)) + (1 << 39), 0, (1 << 40) - 1)
    return shifted


def _used(count: Array, cell_group: Array, groups: Groups) -> tuple[Array, Array]:
    """The cells that are compared, and those of them in which all members were seen."""
    some = np.flatnonzero(count > 0)
    distinct, index = dense(cell_group[some])
    most = np.zeros(len(distinct), dtype=np.int64)
    np.maximum.at(most, index, count[some])
    full = count[some] == most[index]
    share = np.bincount(index, weights=full) / np.bincount(index)
    enough = np.where(share >= _FEW_FULL, 1.0, 0.5)[index] * most[index]
    used, whole = np.zeros(len(count), dtype=bool), np.zeros(len(count), dtype=bool)
    used[some] = (count[some] >= enough) & (count[some] > 1)
    whole[some] = count[some] >= np.maximum(groups.size[cell_group[some]], most[index])
    return used, whole


def _nodes(node: Array, cell: Array, count: Array, order: Array) -> Array:
    """By cell: how many nodes entered it, up to 2."""
    nodes = np.minimum(count, 1)
    ordered, by_node = cell[order], node[order]
    apart = np.flatnonzero((ordered[1:] == ordered[:-1]) & (by_node[1:] != by_node[:-1]))
    nodes[ordered[apart]] = 2
    return nodes


def _columns(kind: Array, sequence: Array) -> Array:
    """A number that is equal for the same collective of groups of one kind."""
    least = int(sequence.min())
    width = int(sequence.max()) - least + 1
    if width < 1 << 50:
        plain: Array = (kind.astype(np.int64) + 1) * width + (sequence - least)
        return plain
    columns: Array = dense(sequence)[1] * 4 * _MOST_KINDS + kind + 1
    return columns


_SLOPE = 0.5
_KEPT = 0.8
"""What earlier windows count, each over the one after it."""
_MOST_ROWS = 512
_MOST_PAIRS = 4096
_BITS = 20
_MASK = (1 << _BITS) - 1


@dataclass(slots=True)
class Waits:
    """What has been learned of pairs of successive operations, over the windows of a round."""

    sums: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of each kind of pair: the sum of squares of the time to the last entry, and that of its
    products with the time to the rank's next entry, both without their means by rank."""

    def learn(self, matched: Matched, phase: Array) -> Array:
        """Take in a window. Returns for each entry whether the rank waits in it for the last."""
        pair = _pairs(matched, phase)
        rows = matched.row
        every = max(1, (int(rows.max()) + 1) // _MOST_ROWS)
        some = np.flatnonzero(matched.leads & (rows % every == 0))
        kinds, index = np.unique(pair[some], return_inverse=True)
        to_last, to_next = _relative(matched)
        to_last, to_next = to_last[some], to_next[some]
        squares, products = _sums(rows[some], index, to_last, to_next, len(kinds))
        for number, kind in enumerate(kinds):
            square, product = self.sums.pop(int(kind), (0.0, 0.0))
            self.sums[int(kind)] = (
                square * _KEPT + float(squares[number]), product * _KEPT + float(products[number]),
            )  # fmt: skip
        for old in list(self.sums)[:-_MOST_PAIRS]:
            del self.sums[old]
        return self.in_entries(matched, phase)

    def in_entries(self, matched: Matched, phase: Array) -> Array:
        """For each entry whether the rank waits in it for the last, by what was learned."""
        pair = _pairs(matched, phase)
        kinds = np.sort(np.fromiter(self.sums, dtype=np.int64, count=len(self.sums)))
        if not len(kinds):
            return matched.leads
        waits = np.array([self._is_synchronous(int(kind)) for kind in kinds])
        place = np.minimum(np.searchsorted(kinds, pair), len(kinds) - 1)
        seen = kinds[place] == pair
        synchronous: Array = (waits[place] | ~seen | matched.is_transfer) & matched.leads
        return synchronous

    def _is_synchronous(self, kind: int) -> bool:
        square, product = self.sums[kind]
        return product > _SLOPE * square or square <= 0


def _relative(matched: Matched) -> tuple[Array, Array]:
    """The times to the last entry and to the rank's next one.

    When a collective ends on devices is unknown: only the differences between ranks are known.
    """
    to_last, to_next = matched.last_s - matched.at_s, matched.to_next_s
    if not matched.is_timed:
        return to_last, to_next
    cells = int(matched.cell.max()) + 1

    def apart(times: Array) -> Array:
        usual = means_by(matched.cell, times, cells)[matched.cell]
        return np.where(matched.is_transfer, times, times - usual)

    return apart(to_last), apart(to_next)


def _pairs(matched: Matched, phase: Array) -> Array:
    """A number for each entry, equal for the same operation before the same operation."""
    following = np.r_[matched.op[1:], 0].astype(np.int64) & _MASK
    kind = (matched.op.astype(np.int64) & _MASK) << 2 * _BITS
    pairs: Array = kind | following << _BITS | phase & _MASK
    return pairs


def _sums(
    row: Array, index: Array, to_last: Array, to_next: Array, kinds: int
) -> tuple[Array, Array]:
    cell = np.unique(row, return_inverse=True)[1] * kinds + index
    count = np.maximum(np.bincount(cell), 1)
    last = to_last - (np.bincount(cell, weights=to_last) / count)[cell]
    following = to_next - (np.bincount(cell, weights=to_next) / count)[cell]
    squares: Array = np.bincount(index, weights=last * last, minlength=kinds)
    products: Array = np.bincount(index, weights=last * following, minlength=kinds)
    return squares, products
