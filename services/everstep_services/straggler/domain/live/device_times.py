"""When ranks began operations on their devices, by how long these lasted there.

NCCL's operations run later than the thread that asks for them, and no clock shows when. They end on
all ranks of a group at once: so the rank where an operation was shortest was the last to come.
"""

import numpy as np

from everstep_services.straggler.domain.operations import Array

_MOST_ROUNDS = 80


def device_times_us(row: Array, cell: Array, asked_us: Array, lasted_us: Array) -> Array | None:
    """When each operation began on its device; None where they have no common order.

    The earliest instants that all durations allow. An operation begins after its rank has asked
    for it and after the rank's operation before has ended, and ends where its cell's last one does.
    """
    order = np.argsort((row.astype(np.int64) << 40) | asked_us, kind="stable")
    rows, cells = row[order], cell[order]
    level = levels(rows, cells, int(cell.max()) + 1)
    if level is None:
        return None
    asked, lasted = asked_us[order], lasted_us[order]
    by_level = np.lexsort((cells, level))
    ends = np.cumsum(np.bincount(level))
    is_first = np.r_[True, rows[1:] != rows[:-1]]
    over = np.zeros(len(order), dtype=np.int64)
    for begin, end in zip(np.r_[0, ends[:-1]], ends, strict=True):
        at = by_level[begin:end]
        free = np.where(is_first[at], 0, over[at - 1])
        ending = np.maximum(asked[at], free) + lasted[at]
        starts = np.flatnonzero(np.r_[True, cells[at][1:] != cells[at][:-1]])
        last = np.maximum.reduceat(ending, starts)
        over[at] = np.repeat(last, np.diff(np.r_[starts, len(at)]))
    times_us = np.empty(len(order), dtype=np.int64)
    times_us[order] = over - lasted
    return times_us


def levels(row: Array, cell: Array, cells: int) -> Array | None:
    """For each entry, by row and time, how many operations must precede it, at least."""
    count = np.bincount(row)
    place = np.arange(len(row)) - (np.cumsum(count) - count)[row]
    level = place.copy()
    base = row.astype(np.int64) << 32
    for _ in range(_MOST_ROUNDS):
        most = np.zeros(cells, dtype=np.int64)
        np.maximum.at(most, cell, level)
        after = np.maximum.accumulate(base + most[cell] - place + len(row)) - base - len(row)
        after += place
        if (after == level).all():
            return level
        level = after
    return None
