"""The parts of a report, from a case and its prices."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from everstep_services.straggler.domain import scores
from everstep_services.straggler.domain.arrays import combined, means_by
from everstep_services.straggler.domain.case import TraceCase, row_means
from everstep_services.straggler.domain.dependencies import Trace
from everstep_services.straggler.domain.operations import Array, OperationKind
from everstep_services.straggler.domain.prices import Questions
from everstep_services.straggler.domain.report import (
    Design,
    Finding,
    HeatMap,
    PartKind,
    PartRow,
    RankRow,
    Share,
    StepRow,
)
from everstep_services.straggler.domain.whatif import Decomposed

_MOST_COLUMNS = 400
_UNEVEN = 0.05
_HOLDS_UP = 0.01


def findings(case: TraceCase, prices: Sequence[float | None]) -> tuple[Finding, ...]:
    trace = case.trace
    rows = []
    for suspect, price in zip(case.suspects, prices, strict=True):
        ranks = tuple(int(trace.ranks[row]) for row in suspect.ranks)
        hosts = [trace.table.hosts[rank] for rank in ranks if rank in trace.table.hosts]
        rows.append(
            Finding(
                kind=suspect.kind,
                ranks=ranks,
                hosts=tuple(dict.fromkeys(hosts)),
                role=case.roles[int(case.role[suspect.ranks[0]])],
                cause=suspect.cause,
                slower_ratio=suspect.ratio,
                lost_s=suspect.lost_s,
                price_ratio=price,
                confidence=suspect.confidence,
                first_step=int(trace.steps[suspect.first_step]),
                last_step=int(trace.steps[suspect.last_step]),
                cleared=suspect.cleared,
                reason=suspect.reason,
            )
        )
    return tuple(sorted(rows, key=lambda finding: -(finding.price_ratio or finding.slower_ratio)))


def gap_notes(price: float | None, whole: float | None) -> Iterator[str]:
    """A note if time between operations, which no finding has, holds others up."""
    if whole is not None and whole < -_HOLDS_UP:
        yield (
            f"with all ranks alike the job would be {-whole * 100:.1f} % slower: those with less "
            "work are those that are waited for"
        )
    if price is not None and price < -_HOLDS_UP:
        yield (
            f"the job would be {-price / (1 + price) * 100:.1f} % faster without the time between "
            f"operations that the trace does not explain; prices are without it"
        )


def designs(
    case: TraceCase, factors: Array, stages: float | None, lengths: float | None
) -> tuple[Design, ...]:
    rows = []
    worst = int(np.argmax(factors))
    if factors[worst] > 1 + _UNEVEN:
        ranks = tuple(int(rank) for rank in case.trace.ranks[case.role == worst])
        rows.append(
            Design(
                what="uneven stages",
                role=case.roles[worst],
                ranks=ranks,
                slower_ratio=float(factors[worst] - 1),
                price_ratio=stages,
                reason=f"{case.roles[worst]} computes {(factors[worst] - 1) * 100:.1f} % longer "
                f"than the mean of {len(factors)} roles, in the median of its ranks",
            )
        )
    if lengths is not None and lengths > 0.01:
        has_lengths = (case.amount != 1).any()
        how = "as their lengths say" if has_lengths else "forwards as backwards"
        rows.append(
            Design(
                what="sequence lengths",
                role="",
                ranks=(),
                slower_ratio=lengths,
                price_ratio=lengths,
                reason=f"microbatches take unequal times, {how}; ranks wait for the longest",
            )
        )
    return tuple(sorted(rows, key=lambda design: -(design.price_ratio or 0.0)))


def shares(
    questions: Questions, whole: int, causes: Sequence[tuple[str, int | None]]
) -> tuple[Share, ...]:
    if questions.outcome is None:
        return ()
    rows = [
        Share(cause=name, ratio=questions.saved(number))
        for name, number in causes
        if number is not None
    ]
    rest = questions.saved(whole) - sum(share.ratio for share in rows)
    return (*rows, Share(cause="rest", ratio=max(0.0, rest)))


def rank_rows(case: TraceCase, prices: dict[int, float | None]) -> tuple[RankRow, ...]:
    trace = case.trace
    relative, individual = _scores(case)
    late = _lateness(trace)
    own_s, ratios = np.median(case.own_time.total_s, axis=0), row_means(case.scored)
    return tuple(
        RankRow(
            rank=int(trace.ranks[row]),
            host=trace.table.hosts.get(int(trace.ranks[row]), ""),
            role=case.roles[int(case.role[row])],
            own_s=float(own_s[row]),
            slower_ratio=_number(ratios[row]),
            late_s=_number(late[row]),
            relative_score=_number(relative[row]),
            individual_score=_number(individual[row]),
            price_ratio=prices.get(row),
        )
        for row in range(len(trace.ranks))
    )


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _scores(case: TraceCase) -> tuple[Array, Array]:
    """NVRx's, as it would report the computations of the whole trace, and of its last window."""
    trace, ranks, ops = case.trace, len(case.trace.ranks), len(case.trace.table.ops)
    compute = np.flatnonzero((trace.kinds == OperationKind.COMPUTE) & (trace.table.duration > 0))
    nothing = np.full(ranks, np.nan)
    if not len(compute):
        return nothing, nothing

    def statistics(rows: Array) -> tuple[Array, Array, Array]:
        rank, op, took = trace.rank[rows], trace.table.op[rows], trace.table.duration[rows]
        key = rank * ops + op
        counts = np.bincount(key, minlength=ranks * ops).reshape(ranks, ops)
        averages = np.nan_to_num(means_by(key, took, ranks * ops)).reshape(ranks, ops)
        return scores.lower_medians(rank, op, took, (ranks, ops)), counts, averages

    names = trace.table.ops
    relative = scores.relative_gpu_scores(*statistics(compute), names)
    best, individual = np.full((ranks, ops), np.nan), nothing
    step = np.searchsorted(trace.steps, trace.table.step[compute])
    for first in range(0, len(trace.steps), case.window):
        now = compute[(step >= first) & (step < first + case.window)]
        if len(now):
            individual, best = scores.individual_gpu_scores(*statistics(now), names, best)
    return relative, individual


def _lateness(trace: Trace) -> Array:
    """Behind the first rank to enter, in the median over collectives; NaN for none."""
    rows = np.flatnonzero(trace.collective >= 0)
    if not len(rows):
        return np.full(len(trace.ranks), np.nan)
    key = trace.collective[rows]
    first = np.full(int(key.max()) + 1, np.inf)
    np.minimum.at(first, key, trace.table.start[rows])
    late = trace.table.start[rows] - first[key]
    zeros = np.zeros(len(rows), dtype=np.int64)
    return scores.lower_medians(trace.rank[rows], zeros, late, (len(trace.ranks), 1))[:, 0]


_KIND_WORDS: Mapping[OperationKind, PartKind] = {
    OperationKind.COMPUTE: "compute",
    OperationKind.COLLECTIVE: "collective",
    OperationKind.SEND: "send",
    OperationKind.RECEIVE: "receive",
    OperationKind.WAIT: "wait",
}


def part_rows(
    case: TraceCase, key: Array, names: Sequence[str], questions: Questions, asked: dict[int, int]
) -> tuple[PartRow, ...]:
    parts, steps = case.parts, len(case.trace.steps)
    gaps = None if names is case.roles else case.trace.table.gap
    lag_s = parts.lag_s if gaps is None else np.where(gaps < 0, parts.lag_s, 0.0)
    own_s = np.bincount(key, weights=lag_s + parts.work_s, minlength=len(names))
    members = combined(key, case.trace.rank)
    _, first = np.unique(members, return_index=True)
    ranks = np.maximum(np.bincount(key[first], minlength=len(names)), 1)
    numbers, at = np.unique(key, return_index=True)
    kinds = dict(zip(numbers.tolist(), case.trace.kinds[at].tolist(), strict=True))
    rows = [
        PartRow(
            name=names[number],
            kind="" if names is case.roles else _KIND_WORDS[OperationKind(kind)],
            own_s=float(own_s[number] / ranks[number] / steps),
            price_ratio=questions.price(asked.get(number)),
        )
        for number, kind in kinds.items()
    ]
    if gaps is not None:
        rows += _gap_rows(gaps, parts.lag_s, names, steps * len(case.trace.ranks))
    return tuple(sorted(rows, key=lambda part: -part.own_s))


def _gap_rows(gaps: Array, lag_s: Array, names: Sequence[str], count: int) -> list[PartRow]:
    """The time between operations, by what the trace shows of it."""
    named = gaps >= 0
    own_s = np.bincount(gaps[named], weights=lag_s[named], minlength=len(names)) / count
    return [
        PartRow(name=names[number], kind="gap", own_s=float(own_s[number]), price_ratio=None)
        for number in np.flatnonzero(own_s > 0).tolist()
    ]


def step_rows(parts: Decomposed, questions: Questions, whole: int) -> tuple[StepRow, ...]:
    outcome = questions.outcome
    slowdown: dict[int, float] = {}
    if outcome is not None:
        ideal = outcome.step_s[:, whole + 1]
        good = ideal > 0
        ratios = outcome.step_s[good, 0] / ideal[good]
        slowdown = dict(zip(outcome.steps[good].tolist(), ratios.tolist(), strict=True))
    return tuple(
        StepRow(
            step=int(step),
            duration_s=float(parts.step_s[number]),
            slowdown_ratio=slowdown.get(number),
            error_ratio=_number(parts.error[number]),
        )
        for number, step in enumerate(parts.trace.steps)
    )


def counts(case: TraceCase) -> dict[str, int]:
    counts = np.bincount(case.role, minlength=len(case.roles))
    return {name: int(count) for name, count in zip(case.roles, counts, strict=True)}


def median_error(parts: Decomposed) -> float | None:
    errors = parts.error[np.isfinite(parts.error)]
    return float(np.median(errors)) if len(errors) else None


def heat_map(case: TraceCase) -> HeatMap:
    """By step, or by spans of steps where there are too many."""
    own_s = case.own_time.total_s
    width = -(-len(own_s) // _MOST_COLUMNS)
    columns = [own_s[at : at + width].mean(axis=0) for at in range(0, len(own_s), width)]
    total = np.array(columns)
    ratios = np.full(total.shape, np.nan)
    for role in range(len(case.roles)):
        members = np.flatnonzero(case.role == role)
        usual = np.median(total[:, members], axis=1)
        some = np.flatnonzero(usual > 0)
        ratios[np.ix_(some, members)] = total[np.ix_(some, members)] / usual[some, None]
    steps = case.trace.steps[case.own_time.steps[::width]]
    return HeatMap(
        ranks=tuple(int(rank) for rank in case.trace.ranks),
        steps=tuple(int(step) for step in steps),
        ratios=tuple(tuple(_number(ratio) for ratio in row) for row in ratios.T),
    )
