"""Operations of several ranks that belong together, and the ranks' clocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from everstep_services.straggler.domain.arrays import (
    combined,
    dense,
    medians_by,
    medians_of,
    ordinals,
)
from everstep_services.straggler.domain.operations import (
    Array,
    OperationKind,
    Operations,
    Place,
    direction_of,
    is_of_all,
)

_DIMENSIONS = {
    "data": ("dp", "data", "data_parallel", "data-parallel"),
    "tensor": ("tp", "tensor", "tensor_parallel", "tensor-parallel", "mp"),
    "pipeline": ("pp", "pipeline", "pipeline_parallel", "pipeline-parallel"),
    "expert": ("ep", "expert", "expert_parallel", "expert-parallel"),
}
"""Names of groups that every rank uses for a group of its own."""
_COORDINATES = ("data", "pipeline", "tensor", "expert")
_UNNAMED = (("pipeline", "tensor"), ("data", "tensor", "expert"), ("data", "pipeline", "expert"))
"""What the ranks of a collective without a group may have in common, the most usual first."""
_APART_S, _CONTRADICTED = 1e-3, 0.05
_ITERATIONS = 20
_MOST_SAMPLES = 200_000


@dataclass(frozen=True, slots=True)
class ClockCorrection:
    """How far each rank's clock is ahead, estimated: collectives end everywhere at once."""

    offsets_s: Mapping[int, float]
    error_s: float
    """Half of all collectives end within this of each other, once clocks are aligned."""


def matched(table: Operations) -> Array:
    """For each row the number of the collective that it takes part in; -1 for none.

    Rows of one step, one group and one sequence number belong together; without numbers, the
    n-th of a name in a group on every rank.
    """
    at = np.flatnonzero(table.kinds() == OperationKind.COLLECTIVE)
    keys = np.full(len(table), -1, dtype=np.int64)
    if not len(at):
        return keys
    groups = _instances(table, at)
    number = np.where(table.sequence[at] >= 0, table.sequence[at], -1)
    cells = combined(groups, table.op[at], table.step[at], table.rank[at])
    ordinal = ordinals(cells, table.start[at])
    ordinal[number >= 0] = 0
    keys[at] = combined(groups, table.step[at], table.op[at], number, ordinal)
    return keys


def _instances(table: Operations, at: Array) -> Array:
    """The process group of each of these rows: ranks may use one name for groups of their own."""
    groups = table.group[at].astype(np.int64)
    if not table.places:
        return groups
    ranks, index = dense(table.rank[at])
    places = [table.places.get(int(rank), Place()) for rank in ranks]
    instances = np.zeros(len(at), dtype=np.int64)
    for name, others in _dimensions(table):
        rows = groups == name
        if rows.any():
            instances[rows] = _numbered(places, others)[index][rows]
    unnamed = np.flatnonzero(groups < 0)
    for op in np.unique(table.op[at[unnamed]]):
        rows = unnamed[table.op[at[unnamed]] == op]
        instances[rows] = _taking_part(table, at[rows], places, index[rows])
    return combined(groups, instances)


def _numbered(places: Sequence[Place], others: Sequence[str]) -> Array:
    """A number for each rank, equal for those that have these coordinates in common."""
    keys = [tuple(getattr(place, other) for other in others) for place in places]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys])


def _taking_part(table: Operations, at: Array, places: Sequence[Place], rank: Array) -> Array:
    """Who takes part in these collectives without a group: none ends before all have begun.

    The ranks of a stage, mostly; if that is contradicted, those of a pipeline or of one stage of
    it; each rank alone if no group fits.
    """
    groupings = [_numbered(places, others) for others in _UNNAMED]
    if is_of_all(table.ops[int(table.op[at[0]])]):
        groupings.insert(0, np.zeros(len(places), dtype=np.int64))
    for grouping in groupings:
        if _fits(table, at, grouping[rank], rank):
            return grouping[rank]
    return rank


def _fits(table: Operations, at: Array, group: Array, rank: Array) -> bool:
    """Whether collectives of these groups hardly ever end on a rank before another begins."""
    ordinal = ordinals(combined(group, table.step[at], rank), table.start[at])
    key = combined(group, table.step[at], ordinal)
    count = int(key.max()) + 1
    # A rank whose clock is ahead is late each time by the same amount.
    off = table.end[at] - medians_of(key, table.end[at])
    ahead = medians_of(rank, off)
    begin, end = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(begin, key, table.start[at] - ahead)
    np.minimum.at(end, key, table.end[at] - ahead)
    return float((begin > end + _APART_S).mean()) <= _CONTRADICTED


def _dimensions(table: Operations) -> list[tuple[int, list[str]]]:
    """Groups whose name is a dimension, and the coordinates that tell its groups apart."""
    dimensions = []
    for number, name in enumerate(table.groups):
        for dimension, names in _DIMENSIONS.items():
            if name.lower() in names:
                dimensions.append(
                    (number, [coordinate for coordinate in _COORDINATES if coordinate != dimension])
                )
    return dimensions


def aligned(table: Operations) -> tuple[Operations, ClockCorrection | None]:
    """The table on one clock, and how far the ranks' clocks were apart; None if they were not.

    Differences within the scatter of collectives do not count as differences of clocks.
    """
    keys = matched(table)
    at = np.flatnonzero(keys >= 0)
    if len(at) > _MOST_SAMPLES:
        every = -(-len(at) // _MOST_SAMPLES)
        at = at[keys[at] % every == 0]
    sizes = np.bincount(keys[at], minlength=1)
    at = at[sizes[keys[at]] > 1]
    if not len(at):
        return table, None
    _, key = dense(keys[at])
    ranks, rank = dense(table.rank[at])
    end = table.end[at]
    middle = float(np.median(end))
    offset, drift = np.zeros(len(ranks)), np.zeros(len(ranks))
    before = _scatter(key, end)
    for _ in range(_ITERATIONS):
        off = end - offset[rank] - drift[rank] * (end - middle)
        residual = off - medians_of(key, off)
        offset += np.nan_to_num(medians_by(rank, residual, len(ranks)))
        drift += _slopes(rank, end - middle, residual, len(ranks))
    after = _scatter(key, end - offset[rank] - drift[rank] * (end - middle))
    if after * 2 >= before:
        return table, None
    every_rank, index = dense(table.rank)
    places = np.searchsorted(ranks, every_rank)
    places[places == len(ranks)] = 0
    seen = ranks[places] == every_rank
    by_rank = np.where(seen, offset[places], 0.0)
    by_drift = np.where(seen, drift[places], 0.0)
    start = table.start - by_rank[index] - by_drift[index] * (table.start - middle)
    offsets = {int(of_rank): float(by_rank[number]) for number, of_rank in enumerate(every_rank)}
    duration = table.duration * (1 - by_drift[index])
    return replace(table, start=start, duration=duration), ClockCorrection(offsets, after)


def _scatter(key: Array, end: Array) -> float:
    apart = np.abs(end - medians_of(key, end))
    return float(np.percentile(apart, 90))


def _slopes(rank: Array, time: Array, residual: Array, count: int) -> Array:
    """How much each rank's residuals grow with time, from its first half to its second."""
    middle = medians_by(rank, time, count)
    later = time > middle[rank]
    halves = [
        (medians_by(rank[rows], values[rows], count))
        for values in (residual, time)
        for rows in (later, ~later)
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        slopes = (halves[0] - halves[1]) / (halves[2] - halves[3])
    return np.where(np.isfinite(slopes) & (np.abs(slopes) < 1e-3), slopes, 0.0)


def pairs(table: Operations) -> tuple[Array, Array]:
    """Rows of sends and of the receives that belong to them, in the order of a stage's traffic.

    By group where a group has one sender and one receiver, else by the ranks' places in the
    pipeline and the direction that the name says. Rows without a partner are left out.
    """
    kinds = table.kinds()
    at = np.flatnonzero((kinds == OperationKind.SEND) | (kinds == OperationKind.RECEIVE))
    if not len(at):
        return at, at
    at = at[np.argsort(table.start[at], kind="stable")]
    sends = kinds[at] == OperationKind.SEND
    ends = _links(table, at, sends)
    is_linked = ends >= 0
    at, sends, ends = at[is_linked], sends[is_linked], ends[is_linked]
    number = np.where(table.sequence[at] >= 0, table.sequence[at], -1)
    ordinal = ordinals(combined(ends, table.step[at], sends, number))
    key = combined(ends, table.step[at], number, ordinal)
    size = int(key.max(initial=-1)) + 1
    sender, receiver = np.full(size, -1), np.full(size, -1)
    sender[key[sends]] = at[sends]
    receiver[key[~sends]] = at[~sends]
    both = (sender >= 0) & (receiver >= 0)
    return sender[both], receiver[both]


def _links(table: Operations, at: Array, sends: Array) -> Array:
    """A number for each row, equal for both ends of a link; -1 where it is not known."""
    if (table.group[at] >= 0).all():
        senders = np.unique(np.c_[table.group[at[sends]], table.rank[at[sends]]], axis=0)
        receivers = np.unique(np.c_[table.group[at[~sends]], table.rank[at[~sends]]], axis=0)
        groups = [
            np.bincount(ends[:, 0], minlength=len(table.groups)) for ends in (senders, receivers)
        ]
        # Two ranks that send to each other under one name: the direction tells them apart.
        if max(int(group.max(initial=0)) for group in groups) <= 1:
            return table.group[at].astype(np.int64)
    return _by_place(table, at, sends)


def pipeline_columns(places: Sequence[Place]) -> Array:
    """A number for each place, equal for those that differ only in their stage of the pipeline."""
    return _numbered(places, ("data", "tensor", "expert"))


def _by_place(table: Operations, at: Array, sends: Array) -> Array:
    ranks, index = dense(table.rank[at])
    places = [table.places.get(int(rank), Place()) for rank in ranks]
    if any(place.pipeline is None for place in places):
        return np.full(len(at), -1)
    stage = np.array([place.pipeline for place in places])[index]
    column = pipeline_columns(places)[index]
    direction = np.array([direction_of(name) for name in table.ops])[table.op[at]]
    count = int(stage.max()) + 1
    source = np.where(sends, stage, (stage - direction) % count)
    links = combined(column, source, direction)
    return np.where(direction == 0, -1, links)
