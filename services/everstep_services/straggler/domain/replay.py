"""Steps replayed by their dependencies: how long they would take if operations took another time.

The graph of a step has a node for each computation, three for each transfer: its rank is ready, all
are ready, it is over. A node ends when the last one before it has ended, and its own time is over.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from everstep_services.straggler.domain.arrays import dense
from everstep_services.straggler.domain.dependencies import Trace, pipeline_edges
from everstep_services.straggler.domain.operations import Array, OperationKind


@dataclass(frozen=True, slots=True)
class Graph:
    """One step's nodes, put in the order of levels: whatever a node waits for is before it."""

    entry: Array
    """Of each row the node at which its rank begins it."""
    final: Array
    """Of each row the node at which it is over: the same for a computation."""
    begin: Array
    """Of each rank the node at which its step begins."""
    hub: Array
    """Of each row the node at which all are ready; -1 for a computation."""
    count: int
    levels: tuple[tuple[int, int, Array, Array], ...]
    """Nodes from, to; the nodes that they wait for; where each one's begin in that list."""
    last: Array
    """Nodes by rank: the final ones of each rank's rows."""
    last_bounds: Array
    waits: tuple[Array, Array]
    """All edges, sorted by target: sources, and where each node's begin."""


class CyclicStepError(Exception):
    """The dependencies that were read from the order of operations contradict each other."""


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of a step as they are numbered at first."""

    entry: Array
    final: Array
    hub: Array
    rank: Array
    ranks: int
    count: int


class _Edges:
    """The edges between nodes, gathered one by one."""

    def __init__(self) -> None:
        self._sources: list[Array] = []
        self._targets: list[Array] = []

    def add(self, source: Array, target: Array) -> None:
        self._sources.append(source)
        self._targets.append(target)

    def __call__(self) -> tuple[Array, Array]:
        return np.concatenate(self._sources), np.concatenate(self._targets)


def graph_of(trace: Trace, number: int) -> Graph:
    """The graph of one step, the same for all of its structure. Raises `CyclicStepError`."""
    low, high = int(trace.bounds[number]), int(trace.bounds[number + 1])
    size, ranks = high - low, len(trace.ranks)
    transfer = np.flatnonzero(trace.kinds[low:high] != OperationKind.COMPUTE)
    entry = ranks + np.arange(size)
    final = entry.copy()
    final[transfer] = ranks + size + np.arange(len(transfer))
    hub_of, hubs = _hubs(trace, low, high, transfer)
    base = ranks + size + len(transfer)
    hub = np.full(size, -1)
    hub[transfer] = base + hub_of
    nodes = _Nodes(entry, final, hub, trace.rank[low:high], ranks, base + hubs)
    edges = _Edges()
    _add_own(edges, trace, low, nodes)
    alone = np.setdiff1d(entry, edges()[1]) - ranks
    edges.add(nodes.rank[alone], entry[alone])
    edges.add(entry[transfer], hub[transfer])
    edges.add(hub[transfer], final[transfer])
    sends = _sends_that_do_not_wait(trace, low, high, transfer)
    edges.add(entry[sends], hub[trace.partner[sends + low] - low])
    source, target = pipeline_edges(trace, slice(low, high))
    edges.add(final[source - low], entry[target - low])
    return _ordered(edges, nodes)


def _add_own(edges: _Edges, trace: Trace, low: int, nodes: _Nodes) -> None:
    """Add the edges of each rank's program."""
    high = low + len(nodes.entry)
    program, slot = trace.program[low:high], trace.slot[low:high]
    firsts = np.flatnonzero(slot == 0)
    for number in np.unique(program[firsts]):
        begins = firsts[program[firsts] == number][:, None]
        source, target = trace.edges[int(number)]
        edges.add(nodes.final[begins + source].ravel(), nodes.entry[begins + target].ravel())


def _hubs(trace: Trace, low: int, high: int, transfer: Array) -> tuple[Array, int]:
    """For each transfer the number of the one that it belongs to, and how many there are."""
    rows = transfer + low
    key = np.where(trace.collective[rows] >= 0, trace.collective[rows], -2 - rows)
    partner = trace.partner[rows]
    paired = (partner >= low) & (partner < high)
    if trace.sends_wait:
        key[paired] = -2 - np.minimum(rows, partner)[paired]
    _, number = dense(key)
    return number, int(number.max(initial=-1)) + 1


def _sends_that_do_not_wait(trace: Trace, low: int, high: int, transfer: Array) -> Array:
    """Sends whose receiver waits for them, and not the other way round."""
    if trace.sends_wait:
        return np.empty(0, np.int64)
    partner = trace.partner[transfer + low]
    sends: Array = transfer[
        (trace.kinds[transfer + low] == OperationKind.SEND) & (partner >= low) & (partner < high)
    ]
    return sends


def _ordered(edges: _Edges, nodes: _Nodes) -> Graph:
    source, target = edges()
    level = _levels(source, target, nodes.count)
    order = np.argsort(level, kind="stable")
    place = np.empty(nodes.count, dtype=np.int64)
    place[order] = np.arange(nodes.count)
    source, target = place[source], place[target]
    by_target = np.argsort(target, kind="stable")
    source, target = source[by_target], target[by_target]
    first = np.searchsorted(target, np.arange(nodes.count + 1))
    bounds = np.searchsorted(level[order], np.arange(int(level.max(initial=0)) + 2))
    levels = []
    for begin, end in pairwise(bounds[1:]):
        low, high = int(first[begin]), int(first[end])
        levels.append((int(begin), int(end), source[low:high], first[begin:end] - low))
    final, ranks = place[nodes.final], nodes.ranks
    by_rank = np.argsort(np.r_[nodes.rank, np.arange(ranks)], kind="stable")
    return Graph(
        entry=place[nodes.entry],
        final=final,
        begin=place[:ranks],
        hub=np.where(nodes.hub >= 0, place[nodes.hub], -1),
        count=nodes.count,
        levels=tuple(levels),
        last=np.r_[final, place[:ranks]][by_rank],
        last_bounds=np.r_[0, np.cumsum(np.bincount(nodes.rank, minlength=ranks) + 1)[:-1]],
        waits=(source, first),
    )


def _levels(source: Array, target: Array, count: int) -> Array:
    """How many edges away from a beginning each node is, at most."""
    by_source = np.argsort(source, kind="stable")
    outgoing = target[by_source]
    first = np.searchsorted(source[by_source], np.arange(count + 1))
    waiting = np.bincount(target, minlength=count)
    level = np.full(count, -1)
    front = np.flatnonzero(waiting == 0)
    number = done = 0
    while len(front):
        level[front] = number
        done += len(front)
        lengths = first[front + 1] - first[front]
        at = np.repeat(first[front] - np.r_[0, np.cumsum(lengths)[:-1]], lengths)
        reached, times = np.unique(outgoing[at + np.arange(len(at))], return_counts=True)
        waiting[reached] -= times
        front = reached[waiting[reached] == 0]
        number += 1
    if done < count:
        raise CyclicStepError
    return level


def waited(graph: Graph, ends: Array) -> Array:
    """When the last node that each node waits for has ended; for a rank's first node, its begin."""
    source, first = graph.waits
    times = ends.copy()
    some = np.flatnonzero(np.diff(first) > 0)
    if len(some):
        times[some] = np.maximum.reduceat(ends[source], first[some], axis=0)
    return times


@dataclass(frozen=True, slots=True)
class Times:
    """The own times of each row, without waits."""

    lag_s: Array
    """From when it could have begun until its rank began it."""
    work_s: Array
    """A computation's duration; of a transfer what remains once all are ready."""


def observed(graph: Graph, trace: Trace, number: int, begun: Array) -> Times:
    """Take one step's durations apart. `begun` is when each rank was through with the last one."""
    rows = slice(int(trace.bounds[number]), int(trace.bounds[number + 1]))
    start, end = trace.table.start[rows], trace.table.end[rows]
    ends = np.zeros(graph.count)
    ends[graph.begin] = begun
    ends[graph.final] = end
    transfer = graph.hub >= 0
    ends[graph.entry[transfer]] = start[transfer]
    ends[graph.hub[transfer]] = -np.inf
    free = waited(graph, ends)
    ends[graph.hub[transfer]] = free[graph.hub[transfer]]
    lag = np.maximum(start - free[graph.entry], 0.0)
    work = np.where(transfer, np.maximum(end - ends[graph.hub], 0.0), end - start)
    return Times(lag, work)


def replay(graph: Graph, begun: Array, lag: Array, work: Array) -> Array:
    """When each rank is through with a step. Columns are variants that are replayed together."""
    own_s = np.zeros((graph.count, lag.shape[1]))
    own_s[graph.final] = work
    own_s[graph.entry] += lag
    own_s[graph.begin] = begun
    for begin, end, sources, bounds in graph.levels:
        own_s[begin:end] += np.maximum.reduceat(own_s[sources], bounds, axis=0)
    through: Array = np.maximum.reduceat(own_s[graph.last], graph.last_bounds, axis=0)
    return through
