"""What an operation waits for, read from the order of operations that never changes.

Operations of a rank run in streams: its computations in one, and each kind of transfer in one of
its own. An operation depends on the last one of each stream that had ended before it began in
every step and on every rank of the same program; an order by chance does not hold everywhere.
"""

from dataclasses import dataclass

import numpy as np

from everstep_services.straggler.domain.arrays import combined, dense, ordinals
from everstep_services.straggler.domain.collectives import matched, pairs, pipeline_columns
from everstep_services.straggler.domain.operations import (
    Array,
    OperationKind,
    Operations,
    Place,
    direction_of,
)

_MOST_INSTANCES = 128
_LEAST_OVERLAP, _MOST_TRIES = 0.05, 8
_LEAST_TOLERANCE_S, _MOST_TOLERANCE_S = 1e-6, 2e-5


@dataclass(frozen=True, slots=True)
class Trace:
    """A table in the order of step, rank, stream and start, with what was read from that order."""

    table: Operations
    kinds: Array
    steps: Array
    """The steps, in order."""
    ranks: Array
    """The ranks, in order."""
    bounds: Array
    """The first row of each step, and the number of rows."""
    rank: Array
    """Of each row, an index into `ranks`."""
    program: Array
    """Of each row, the number of its rank's program in that step."""
    slot: Array
    """Of each row, its place in that program."""
    structure: Array
    """Of each step: equal where the same ranks did the same programs in the same groups."""
    collective: Array
    """Of each row, as `matched` numbers them; -1 for none."""
    partner: Array
    """Of each send its receive, and of each receive its send, as rows; -1 for none."""
    sends_wait: bool
    """Whether a send ends only once its receiver is there."""
    edges: dict[int, tuple[Array, Array]]
    """Of each program: slots, and slots that depend on them."""


def trace_of(table: Operations) -> Trace:
    """Put a table in order, and read dependencies within ranks from it."""
    kinds = table.kinds()
    stream = np.where(kinds == OperationKind.COMPUTE, 0, 1 + combined(kinds, table.op, table.group))
    order = np.lexsort((table.start, stream, table.rank, table.step))
    table, kinds, stream = table.take(order), kinds[order], stream[order]
    steps, step = dense(table.step)
    ranks, rank = dense(table.rank)
    cell = step * len(ranks) + rank
    begins = np.flatnonzero(np.r_[True, cell[1:] != cell[:-1]])
    slot = np.arange(len(table)) - np.repeat(begins, np.diff(np.r_[begins, len(table)]))
    program, of_cell = _programs(table, stream, begins, slot)
    tolerance_s = _tolerance_s(table)
    sender, receiver = pairs(table)
    partner = np.full(len(table), -1)
    partner[sender], partner[receiver] = receiver, sender
    collective = matched(table)
    bounds = np.r_[np.searchsorted(step, np.arange(len(steps))), len(table)]
    return Trace(
        table=table,
        kinds=kinds,
        steps=steps,
        ranks=ranks,
        bounds=bounds,
        rank=rank,
        program=program,
        slot=slot,
        structure=_structures(table, rank, program, collective, bounds),
        collective=collective,
        partner=partner,
        sends_wait=_sends_wait(table, sender, receiver, tolerance_s),
        edges=_edges_of_programs(table, stream, begins, of_cell, tolerance_s),
    )


def _sends_wait(table: Operations, sender: Array, receiver: Array, tolerance_s: float) -> bool:
    """Whether hardly any send had ended before its receiver was there."""
    if not len(sender):
        return False
    early = table.end[sender] < table.start[receiver] - tolerance_s
    return float(early.mean()) < 0.01


def _tolerance_s(table: Operations) -> float:
    """How far operations that follow one another may overlap: times of a file are rounded."""
    sample = table.duration[:: max(1, len(table) // 10_000)]
    rounded = [10.0**-digits for digits in range(7) if _is_whole(sample * 10.0**digits)]
    usual = min(_MOST_TOLERANCE_S, float(np.median(sample)) / 100) if len(sample) else 0.0
    return max(_LEAST_TOLERANCE_S, usual, 1.01 * rounded[0] if rounded else 0.0)


def _is_whole(values: Array) -> bool:
    return bool(np.abs(values - np.rint(values)).max(initial=0.0) < 1e-6 * max(1.0, values.max()))


def _mixed(values: Array) -> Array:
    """Numbers that look random, the same for the same values."""
    mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _programs(table: Operations, stream: Array, begins: Array, slot: Array) -> tuple[Array, Array]:
    """A number for each row, equal where a rank's step has the same operations in that order.

    And the same for each rank's step.
    """
    if not len(table):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # Groups differ from rank to rank, their order within a rank does not.
    shifts = stream[1:] != stream[:-1]
    changed = np.r_[True, shifts]
    changed[begins] = True
    lane = np.cumsum(changed)
    lane -= np.repeat(lane[begins], np.diff(np.r_[begins, len(table)]))
    label = combined(table.op, table.microbatch)
    words = _mixed(label * 64 + lane) ^ _mixed(slot + 1)
    hashes = np.add.reduceat(_mixed(words), begins)
    _, of_cell = dense(hashes)
    return np.repeat(of_cell, np.diff(np.r_[begins, len(table)])), of_cell


def _structures(
    table: Operations, rank: Array, program: Array, collective: Array, bounds: Array
) -> Array:
    """A number for each step, equal where its graph is the same."""
    if not len(table):
        return np.empty(0, np.int64)
    # Collectives of a step are numbered from its own first: the same pattern, the same numbers.
    first = np.full(int(collective.max(initial=-1)) + 1, len(table))
    used = collective >= 0
    np.minimum.at(first, collective[used], np.flatnonzero(used))
    where = np.full(len(table), -1)
    begin = np.repeat(bounds[:-1], np.diff(bounds))
    where[used] = first[collective[used]] - begin[used]
    at = np.arange(len(table)) - begin
    words = _mixed(rank + 1) ^ _mixed(program * 3 + 7) ^ _mixed((where + 2) * 1_000_003 + at)
    return dense(np.add.reduceat(_mixed(words), bounds[:-1]))[1]


def _edges_of_programs(
    table: Operations, stream: Array, begins: Array, of_cell: Array, tolerance_s: float
) -> dict[int, tuple[Array, Array]]:
    lengths = np.diff(np.r_[begins, len(table)])
    edges = {}
    order = np.argsort(of_cell, kind="stable")
    numbers, starts = np.unique(of_cell[order], return_index=True)
    for number, cells in zip(numbers, np.split(order, starts[1:]), strict=True):
        every = -(-len(cells) // _MOST_INSTANCES)
        chosen = begins[cells[::every]]
        rows = chosen[:, None] + np.arange(lengths[cells[0]])
        lanes = dense(stream[rows[0]])[1]
        edges[int(number)] = _edges(table.start[rows] + tolerance_s, table.end[rows], lanes)
    return edges


def _edges(start: Array, end: Array, lanes: Array) -> tuple[Array, Array]:
    """The last operation of each stream that had always ended before each operation began.

    An overlap of a twentieth is allowed: a thread may be seen to end a while after the threads that
    it woke have gone on.
    """
    sources, targets = [], []
    slots = np.arange(start.shape[1])
    for lane in range(int(lanes.max(initial=-1)) + 1):
        members = np.flatnonzero(lanes == lane)
        ends = np.maximum.accumulate(end[:, members], axis=1)
        ended = np.array(
            [np.searchsorted(*pair, side="right") for pair in zip(ends, start, strict=True)]
        )
        over, most = ended.min(axis=0), ended.max(axis=0)
        # Its own place bounds what an operation of the same stream can wait for.
        for counts in (over, most):
            counts[members] = np.minimum(counts[members], np.arange(len(members)))
        took = (end[:, members] - start[:, members]).sum(axis=0) * _LEAST_OVERLAP
        for _ in range(_MOST_TRIES):
            slot = np.flatnonzero(over < most)
            overlap = np.maximum(ends[:, over[slot]] - start[:, slot], 0.0).sum(axis=0)
            good = overlap <= took[over[slot]]
            over[slot[good]] += 1
            most[slot[~good]] = over[slot[~good]]
        some = over > 0
        sources.append(members[over[some] - 1])
        targets.append(slots[some])
    return np.concatenate(sources), np.concatenate(targets)


def pipeline_edges(trace: Trace, rows: slice) -> tuple[Array, Array]:
    """Computations of one step that wait for those of another stage: by microbatch and direction.

    The k-th forward of a microbatch on a stage is of its k-th chunk: it waits for the same on the
    stage before, and on the first stage for the chunk before on the last. Backwards the other way.
    """
    table = trace.table
    direction = np.array([direction_of(name) for name in table.ops] or [0])[table.op[rows]]
    is_staged = (
        (trace.kinds[rows] == OperationKind.COMPUTE)
        & (table.microbatch[rows] >= 0)
        & (direction != 0)
    )
    at = np.flatnonzero(is_staged) + rows.start
    places = [table.places.get(int(rank), Place()) for rank in trace.ranks]
    if not len(at) or any(place.pipeline is None for place in places):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    direction = direction[is_staged]
    stage = np.array([place.pipeline for place in places])[trace.rank[at]]
    column = pipeline_columns(places)[trace.rank[at]]
    last = int(stage.max())
    cells = combined(trace.rank[at], direction, table.microbatch[at])
    chunk = ordinals(cells, table.start[at])
    wraps = stage == np.where(direction > 0, 0, last)
    wanted_stage = np.where(wraps, last - stage, stage - direction)
    wanted_chunk = chunk - wraps
    width = int(chunk.max()) + 2
    base = combined(column, table.microbatch[at], direction) * (last + 1)
    has = (base + stage) * width + chunk + 1
    wants = (base + wanted_stage) * width + wanted_chunk + 1
    order = np.argsort(has)
    place = np.searchsorted(has[order], wants)
    place[place == len(has)] = 0
    sources = order[place]
    good = (has[sources] == wants) & (wanted_chunk >= 0) & (last > 0)
    return at[sources[good]], at[good]


def schedule_of(trace: Trace) -> str:
    """The schedule of microbatches: `GPipe`, `1F1B`, `interleaved 1F1B`, or empty if none shows."""
    if not len(trace.steps):
        return ""
    rows = slice(int(trace.bounds[0]), int(trace.bounds[1]))
    sources, _ = pipeline_edges(trace, rows)
    if not len(sources):
        return ""
    table = trace.table
    at = np.arange(rows.start, rows.stop)
    direction = np.array([direction_of(name) for name in table.ops])[table.op[at]]
    at, direction = (
        column[(direction != 0) & (table.microbatch[at] >= 0)] for column in (at, direction)
    )
    at, direction = (column[trace.kinds[at] == OperationKind.COMPUTE] for column in (at, direction))
    rank = trace.rank[at]
    forwards = at[direction > 0]
    if not len(forwards) or not (direction < 0).any():
        return ""
    cells = combined(trace.rank[forwards], table.microbatch[forwards])
    if np.bincount(cells).max() > 1:
        return "interleaved 1F1B"
    ranks = np.unique(rank)
    late = [
        table.start[at[(rank == number) & (direction > 0)]].max(initial=-np.inf) for number in ranks
    ]
    early = [
        table.start[at[(rank == number) & (direction < 0)]].min(initial=np.inf) for number in ranks
    ]
    return (
        "GPipe" if all(last <= other for last, other in zip(late, early, strict=True)) else "1F1B"
    )
