"""The time that each rank needed by itself in each step, by cause; without its waits."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from everstep.slow_rank_causes import SlowRankCause
from everstep_services.straggler.domain.arrays import combined, dense, medians_of
from everstep_services.straggler.domain.operations import (
    Array,
    OperationKind,
    cause_of,
    direction_of,
)
from everstep_services.straggler.domain.whatif import Decomposed

CAUSES: tuple[SlowRankCause, ...] = ("input", "compute", "host", "unknown")
_CORRELATED = 0.9
_UNEVEN = 0.05


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Steps × ranks, of the steps that count."""

    steps: Array
    """Their numbers in the trace."""
    by_cause: Mapping[SlowRankCause, Array]
    raw_s: Array
    """As measured."""

    @property
    def total_s(self) -> Array:
        """With work made comparable, where lengths of sequences are known."""
        total: Array = sum(self.by_cause.values(), np.zeros_like(self.raw_s))
        return total


def own_time(parts: Decomposed, steps: Array, amount: Array) -> OwnTime:
    """Add up computations and the gaps before operations.

    `amount` is each row's work, 1 for the mean.
    """
    trace = parts.trace
    ranks = len(trace.ranks)
    compute = trace.kinds == OperationKind.COMPUTE
    step = np.repeat(np.arange(len(trace.steps)), np.diff(trace.bounds))
    cell = step * ranks + trace.rank
    size = len(trace.steps) * ranks

    def summed(values: Array) -> Array:
        sums: Array = np.bincount(cell, weights=values, minlength=size).reshape(-1, ranks)[steps]
        return sums

    cause = np.array([CAUSES.index(cause_of(name)) for name in trace.table.ops] or [0])
    gaps = np.full(len(compute), CAUSES.index("host" if compute.any() else "unknown"))
    if trace.table.gap is not None:
        named = trace.table.gap >= 0
        is_input = cause[trace.table.gap] == CAUSES.index("input")
        gaps[named] = np.where(is_input, CAUSES.index("input"), CAUSES.index("host"))[named]
    work, idle = np.where(compute, parts.work_s, 0.0), idle_lags(parts)
    by_cause: dict[SlowRankCause, Array] = {}
    for number, name in enumerate(CAUSES):
        worked = np.where(cause[trace.table.op] == number, work / amount, 0.0)
        by_cause[name] = summed(worked + np.where(gaps == number, idle, 0.0))
    return OwnTime(steps, by_cause, summed(work + idle))


def idle_lags(parts: Decomposed) -> Array:
    """Of each row its lag, without what its rank computed meanwhile.

    A transfer may begin amid a computation.
    """
    trace, lags = parts.trace, parts.lag_s.copy()
    start, end = trace.table.start, trace.table.end
    order = np.lexsort((start, trace.rank))
    bounds = np.searchsorted(trace.rank[order], np.arange(len(trace.ranks) + 1))
    for rank in range(len(trace.ranks)):
        rows = order[bounds[rank] : bounds[rank + 1]]
        busy = rows[trace.kinds[rows] == OperationKind.COMPUTE]
        late = rows[(trace.kinds[rows] != OperationKind.COMPUTE) & (lags[rows] > 0)]
        if not len(busy) or not len(late):
            continue
        ends = np.maximum.accumulate(end[busy])
        begins = np.maximum(start[busy], np.r_[-np.inf, ends[:-1]])
        times = np.c_[begins, np.maximum(ends, begins)].ravel()
        done = np.cumsum(np.maximum(ends - begins, 0.0))
        total = np.c_[np.r_[0.0, done[:-1]], done].ravel()
        computed = np.interp(start[late], times, total) - np.interp(
            start[late] - lags[late], times, total
        )
        lags[late] = np.maximum(lags[late] - computed, 0.0)
    return lags


def amounts(parts: Decomposed) -> Array:
    """Each computation's amount of work, 1 for the mean of its name; 1 if it is not known.

    From the lengths of sequences: the time that fits best is `a n + b n²`.
    """
    table, amounts_ = parts.trace.table, np.ones(len(parts.trace.table))
    if table.tokens is None:
        return amounts_
    has_length = np.isfinite(table.tokens) & (parts.trace.kinds == OperationKind.COMPUTE)
    for op in np.unique(table.op[has_length]):
        rows = np.flatnonzero(has_length & (table.op == op))
        predicted = _fitted(table.tokens[rows], parts.work_s[rows])
        if predicted is not None:
            amounts_[rows] = predicted / predicted.mean()
    return amounts_


def _fitted(tokens: Array, work: Array) -> Array | None:
    if len(tokens) < 8 or np.ptp(tokens) == 0 or tokens.min() < 0:
        return None
    terms = np.c_[tokens, tokens**2] / tokens.max() ** np.array([1, 2])
    weights = np.linalg.lstsq(terms, work, rcond=None)[0]
    for drop in np.flatnonzero(weights < 0):
        weights = np.zeros(2)
        keep = 1 - int(drop)
        weights[keep] = float(terms[:, keep] @ work / (terms[:, keep] @ terms[:, keep]))
    predicted: Array = terms @ weights
    around = float(((work - predicted) ** 2).mean())
    if predicted.min() <= 0 or around > 0.9 * float(work.var()):
        return None
    return predicted


def lengths_vary(parts: Decomposed) -> bool:
    """Whether microbatches that are long forwards are long backwards: their sequences are."""
    trace = parts.trace
    table = trace.table
    direction = np.array([direction_of(name) for name in table.ops] or [0])[table.op]
    rows = np.flatnonzero(
        (trace.kinds == OperationKind.COMPUTE) & (table.microbatch >= 0) & (direction != 0)
    )
    if len(rows) < 32:
        return False
    cell = combined(trace.rank[rows], table.step[rows], table.microbatch[rows])
    size = int(cell.max()) + 1
    ways = [
        np.bincount(cell[part], weights=parts.work_s[rows][part], minlength=size)
        for part in (direction[rows] > 0, direction[rows] < 0)
    ]
    _, first = np.unique(cell, return_index=True)
    rank = dense(trace.rank[rows][first])[1]
    relative = []
    for way in ways:
        usual = medians_of(rank, way)
        relative.append(np.divide(way, usual, out=np.ones(size), where=usual > 0))
    ahead, back = relative
    if ahead.std() < _UNEVEN or back.std() < _UNEVEN:
        return False
    return float(np.corrcoef(ahead, back)[0, 1]) > _CORRELATED
