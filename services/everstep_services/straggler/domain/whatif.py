"""What a slow rank, stage, operation or step costs: replayed without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from everstep_services.straggler.domain.arrays import (
    combined,
    means_by,
    means_of,
    medians_by,
    medians_of,
    ordinals,
)
from everstep_services.straggler.domain.dependencies import Trace
from everstep_services.straggler.domain.operations import Array, OperationKind
from everstep_services.straggler.domain.replay import (
    CyclicStepError,
    Graph,
    graph_of,
    observed,
    replay,
)

MOST_ERROR = 0.05
"""A step whose replay differs by more from what was observed is left out."""
_MOST_CELLS = 400_000_000
_CELLS_AT_ONCE = 4_000_000
_MOST_PEERS = 20_000
_RUN = 8
_TOGETHER_S, _LEAST_MEMBERS = 1e-3, 3


@dataclass(frozen=True, slots=True)
class Decomposed:
    """A trace whose durations are taken apart, and how well that reproduces it."""

    trace: Trace
    lag_s: Array
    work_s: Array
    begun_s: Array
    """Steps × ranks: when each was through with the step before."""
    step_s: Array
    """How long each step took, in the mean over ranks."""
    error: Array
    """Of each step: how far the replay is off, as a ratio; NaN if it could not be replayed."""
    graphs: Mapping[int, Graph]

    @property
    def kept(self) -> Array:
        """The steps whose replay is good enough."""
        good: Array = np.flatnonzero(self.error <= MOST_ERROR)
        return good


def decompose(trace: Trace) -> Decomposed:
    """Take all steps apart, and replay each by itself to see how well that fits."""
    count, ranks = len(trace.steps), len(trace.ranks)
    lag, work = np.zeros(len(trace.table)), np.zeros(len(trace.table))
    begun, step_s = np.zeros((count, ranks)), np.zeros(count)
    error = np.full(count, np.nan)
    graphs: dict[int, Graph] = {}
    through: Array | None = None
    for number in range(count):
        rows = slice(int(trace.bounds[number]), int(trace.bounds[number + 1]))
        first, last = _spans(trace, rows)
        begun[number] = first if through is None else np.minimum(through, first)
        step_s[number] = float(np.mean(last - begun[number]))
        through = last
        graph = _graph(graphs, trace, number)
        if graph is None:
            continue
        times = observed(graph, trace, number, begun[number])
        lag[rows], work[rows] = times.lag_s, times.work_s
        origin = begun[number].min()
        ends = replay(
            graph, (begun[number] - origin)[:, None], times.lag_s[:, None], times.work_s[:, None]
        )[:, 0]
        length = max(float(last.max() - origin), 1e-12)
        error[number] = abs(float(ends.max()) - float(last.max() - origin)) / length
    lag = _without_unseen_waits(trace, lag)
    return Decomposed(trace, lag, work, begun, step_s, error, graphs)


def _without_unseen_waits(trace: Trace, lag: Array) -> Array:
    """The lags without waits for a barrier that is not in the table.

    The ranks of a stage then begin an operation together, however far apart they were ready.
    """
    table, after = trace.table, lag.copy()
    places = [table.places.get(int(rank)) for rank in trace.ranks]
    stage = np.array([-1 if it is None or it.pipeline is None else it.pipeline for it in places])
    cell = combined(trace.rank, table.step, table.op)
    ordinal = ordinals(cell, table.start)
    kind = combined(stage[trace.rank], table.op, table.microbatch, ordinal)
    key = combined(kind, table.step)
    count = int(key.max(initial=-1)) + 1
    begun, ready = _reach(key, count, table.start), _reach(key, count, table.start - lag)
    kind_of = np.zeros(count, dtype=np.int64)
    kind_of[key] = kind
    kinds = int(kind.max(initial=-1)) + 1
    apart = [medians_by(kind_of, high - low, kinds) for low, high in (begun, ready)]
    fits = means_by(kind_of, (ready[1] <= begun[0] + _TOGETHER_S).astype(float), kinds)
    members = np.bincount(key, minlength=count)
    few = np.full(kinds, np.inf)
    np.minimum.at(few, kind_of, members)
    is_barrier = (apart[0] < apart[1] / 10) & (fits >= 1 - MOST_ERROR) & (few >= _LEAST_MEMBERS)
    rows = is_barrier[kind]
    after[rows] = np.maximum(table.start - ready[1][key], 0.0)[rows]
    return after


def _reach(key: Array, count: int, times: Array) -> tuple[Array, Array]:
    """The first and the last time of each key."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, key, times)
    np.maximum.at(high, key, times)
    return low, high


def _graph(graphs: dict[int, Graph], trace: Trace, number: int) -> Graph | None:
    structure = int(trace.structure[number])
    if structure not in graphs:
        try:
            graphs[structure] = graph_of(trace, number)
        except CyclicStepError:
            return None
    return graphs[structure]


def _spans(trace: Trace, rows: slice) -> tuple[Array, Array]:
    bounds = np.searchsorted(trace.rank[rows], np.arange(len(trace.ranks)))
    first: Array = np.minimum.reduceat(trace.table.start[rows], bounds)
    last: Array = np.maximum.reduceat(trace.table.end[rows], bounds)
    return first, last


@dataclass(frozen=True, slots=True)
class Variant:
    """Other times for some of the rows, in their order."""

    rows: Array
    lag_s: Array
    work_s: Array


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """How long the replayed steps take with each variant."""

    steps: Array
    """The numbers of the steps that were replayed."""
    step_s: Array
    """Steps × variants; the first column is the trace as it is."""

    @property
    def total_s(self) -> Array:
        total: Array = self.step_s.sum(axis=0)
        return total

    def price(self, variant: int) -> float:
        """How much faster the job is with this variant: 0.1 for 10 %."""
        total = self.total_s
        return float(total[0] / total[variant + 1] - 1) if total[variant + 1] > 0 else 0.0


def outcome_of(parts: Decomposed, variants: Sequence[Variant]) -> ReplayOutcome:
    """Replay the trace as it is, and with each variant; a sample of its steps, where it is large.

    Steps follow one another as they did: a rank that is late at the end of one is late in the next.
    """
    runs = _sampled(parts, len(variants) + 1)
    steps = np.concatenate(runs) if runs else np.empty(0, np.int64)
    lengths = np.zeros((len(steps), len(variants) + 1))
    most = max((graph.count for graph in parts.graphs.values()), default=1)
    width = max(1, _CELLS_AT_ONCE // most)
    everything: list[Variant | None] = [None, *variants]
    for low in range(0, len(everything), width):
        chosen = everything[low : low + width]
        at = 0
        for run in runs:
            lengths[at : at + len(run), low : low + len(chosen)] = _replayed(parts, run, chosen)
            at += len(run)
    return ReplayOutcome(steps, lengths)


def _sampled(parts: Decomposed, columns: int) -> list[Array]:
    """Runs of steps that follow one another: all, or some that are spread over the trace."""
    kept = parts.kept
    if not len(kept):
        return []
    runs = np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
    most = max(graph.count for graph in parts.graphs.values())
    steps = max(_RUN // 2, _MOST_CELLS // (most * columns))
    if len(kept) <= steps:
        return runs
    pieces = [run[at : at + _RUN] for run in runs for at in range(0, len(run), _RUN)]
    count = max(1, steps // _RUN)
    chosen = np.unique(np.linspace(0, len(pieces) - 1, count).astype(int))
    return [pieces[piece] for piece in chosen]


def _replayed(parts: Decomposed, run: Array, variants: Sequence[Variant | None]) -> Array:
    lengths = np.zeros((len(run), len(variants)))
    begun = np.repeat(parts.begun_s[run[0]][:, None], len(variants), axis=1)
    begun -= begun.min()
    for at, number in enumerate(run):
        trace = parts.trace
        low, high = int(trace.bounds[number]), int(trace.bounds[number + 1])
        graph = parts.graphs[int(trace.structure[number])]
        lag = np.repeat(parts.lag_s[low:high, None], len(variants), axis=1)
        work = np.repeat(parts.work_s[low:high, None], len(variants), axis=1)
        for column, variant in enumerate(variants):
            if variant is not None:
                first, last = np.searchsorted(variant.rows, (low, high))
                rows = variant.rows[first:last] - low
                lag[rows, column] = variant.lag_s[first:last]
                work[rows, column] = variant.work_s[first:last]
        through = replay(graph, begun, lag, work)
        lengths[at] = (through - begun).mean(axis=0)
        begun = through
    return lengths


# ---- the variants


def ideal(parts: Decomposed) -> Variant:
    """All ranks alike: computations the mean, transfers the median, of all of their name."""
    trace = parts.trace
    compute = trace.kinds == OperationKind.COMPUTE
    key = combined(np.zeros(len(trace.table), dtype=np.int64), trace.table.op)
    lag, work = means_of(key, parts.lag_s), means_of(key, parts.work_s)
    medians = medians_of(_sizes(trace, key), parts.work_s)
    return Variant(np.arange(len(key)), lag, np.where(compute, work, medians))


def _sizes(trace: Trace, key: Array) -> Array:
    """Transfers of one name may carry different amounts: the n-th of a step is alike everywhere."""
    transfer = trace.kinds != OperationKind.COMPUTE
    cell = combined(trace.rank, trace.table.step, key)
    return combined(key, np.where(transfer, ordinals(cell), -1))


def as_observed(parts: Decomposed) -> Variant:
    """The trace as it is."""
    return Variant(np.arange(len(parts.lag_s)), parts.lag_s, parts.work_s)


def only(variant: Variant, rows: Array) -> Variant:
    """A variant of all rows, cut down to some of them."""
    return Variant(rows, variant.lag_s[rows], variant.work_s[rows])


def like_peers(
    parts: Decomposed, rows: Array, peers: Array, amount: Array, *, by_rank: bool = True
) -> Variant:
    """These rows as long as those of peers: the longest as their longest, the median as theirs.

    So their own ups and downs remain, and what is too long about them goes. `amount` is how much
    each row had to work on, 1 for the mean. With `by_rank`, what one rank does in two parts others
    may do in one.
    """
    trace = parts.trace
    lag, work = parts.lag_s[rows].copy(), parts.work_s[rows] / amount[rows]
    op, peer_op = trace.table.op[rows], trace.table.op[peers]
    ranks = [len(np.unique(trace.rank[part])) for part in (rows, peers)]
    for number in np.unique(op):
        members, others = np.flatnonzero(op == number), peers[peer_op == number]
        if not len(others):
            continue
        share = len(others) / ranks[1] / (len(members) / ranks[0]) if by_rank else 1.0
        others = others[:: -(-len(others) // _MOST_PEERS)]
        lag[members] = _mapped(lag[members], parts.lag_s[others] * share)
        work[members] = _mapped(work[members], parts.work_s[others] / amount[others] * share)
    return Variant(rows, lag, work * amount[rows])


def _mapped(times: Array, others: Array) -> Array:
    mapped = np.empty(len(times))
    places = (np.arange(len(times)) + 0.5) / len(times)
    mapped[np.argsort(times, kind="stable")] = np.quantile(others, places)
    return mapped


def scaled(parts: Decomposed, rows: Array, factors: Array) -> Variant:
    """Return a variant with the work of these rows multiplied by the factors."""
    return Variant(rows, parts.lag_s[rows], parts.work_s[rows] * factors)


def together(variants: Sequence[Variant]) -> Variant:
    """All of these variants at once; the first one wins where they overlap."""
    rows = np.concatenate([variant.rows for variant in variants])
    rows, first = np.unique(rows, return_index=True)
    lag = np.concatenate([variant.lag_s for variant in variants])[first]
    work = np.concatenate([variant.work_s for variant in variants])[first]
    return Variant(rows, lag, work)
