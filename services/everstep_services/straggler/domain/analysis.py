"""A trace of any origin: which rank is slow, for what cause, and at what price."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everstep_services.straggler.domain import scores, whatif
from everstep_services.straggler.domain.arrays import combined, dense, means_by
from everstep_services.straggler.domain.collectives import aligned
from everstep_services.straggler.domain.dependencies import Trace, schedule_of, trace_of
from everstep_services.straggler.domain.operations import (
    Array,
    Kind,
    Operations,
    without_enclosing,
)
from everstep_services.straggler.domain.own_time import OwnTime, amounts, lengths_vary, own_time
from everstep_services.straggler.domain.report import (
    Design,
    Finding,
    HeatMap,
    PartRow,
    RankRow,
    Report,
    Share,
    StepRow,
)
from everstep_services.straggler.domain.roles import role_groups
from everstep_services.straggler.domain.suspects import Suspect, slow_groups, slow_ranks
from everstep_services.straggler.domain.verdict import Limits
from everstep_services.straggler.domain.whatif import Decomposed, Variant

_MOST_PRICED_RANKS = 16
_MOST_PRICED_PARTS = 12
_MOST_COLUMNS = 400
_WINDOW_STEPS = 10
_UNEVEN = 0.05


class NothingToCompareError(ValueError):
    """A trace without two complete steps, or with one rank."""


@dataclass(frozen=True, slots=True)
class _Case:
    """All that the parts of a report are made from."""

    parts: Decomposed
    own: OwnTime
    roles: tuple[str, ...]
    role: Array
    """Of each rank, an index into `roles`."""
    amount: Array
    suspects: tuple[Suspect, ...]
    window: int
    limits: Limits
    scored: Array
    """Ranks × windows: own time over the role group's median, less 1."""

    @property
    def trace(self) -> Trace:
        return self.parts.trace

    @property
    def row_role(self) -> Array:
        roles: Array = self.role[self.trace.rank]
        return roles


def analyze(table: Operations, limits: Limits | None = None, window: int | None = None) -> Report:
    """Judge a table of operations. Raises `NothingToCompareError`."""
    limits = limits or Limits()
    notes: list[str] = []
    table = _complete(table, notes)
    table, enclosing = without_enclosing(table)
    if enclosing:
        notes.append(f"{enclosing} operations that enclose others were left out")
    table = _complete(table, notes)
    table, clocks = aligned(table)
    if clocks is not None:
        apart = max(clocks.offsets_s.values()) - min(clocks.offsets_s.values())
        notes.append(
            f"clocks were up to {apart:.3g} s apart, and were aligned by collectives to "
            f"{clocks.error_s * 1000:.2g} ms"
        )
    parts = whatif.decompose(trace_of(table))
    case = _case(parts, limits, window, notes)
    return _report(case, notes)


def _complete(table: Operations, notes: list[str]) -> Operations:
    """Only steps that every rank has."""
    ranks, rank = dense(table.rank)
    steps, step = dense(table.step)
    if len(ranks) < 2:
        raise NothingToCompareError("it has one rank only: there is nothing to compare with")
    seen = np.zeros((len(steps), len(ranks)), dtype=bool)
    seen[step, rank] = True
    whole = np.asarray(seen.all(axis=1))
    if whole.sum() < 2:
        raise NothingToCompareError(
            f"{int(whole.sum())} of its {len(steps)} steps are there on all of its "
            f"{len(ranks)} ranks, and two are needed"
        )
    if whole.all():
        return table
    notes.append(f"{int((~whole).sum())} steps that not all ranks have were left out")
    return table.take(np.flatnonzero(whole[step]))


def _case(parts: Decomposed, limits: Limits, window: int | None, notes: list[str]) -> _Case:
    trace = parts.trace
    named = role_groups(trace.table)
    roles = tuple(dict.fromkeys(named.values()))
    role = np.array([roles.index(named[int(rank)]) for rank in trace.ranks])
    kept = parts.kept
    _say_dropped(parts, notes)
    steps = kept if len(kept) >= 2 else np.arange(len(trace.steps))
    amount = amounts(parts)
    own = own_time(parts, steps, amount)
    width = window or max(1, min(_WINDOW_STEPS, len(steps) // 6))
    ranks = slow_ranks(own, role, width, limits)
    groups = slow_groups(parts, steps, width, limits)
    for name, count in zip(roles, np.bincount(role), strict=True):
        if count < limits.peers:
            notes.append(f"role {name!r} has {count} ranks, too few to tell a slow one")
    return _Case(
        parts=parts,
        own=own,
        roles=roles,
        role=role,
        amount=amount,
        suspects=(*ranks.suspects, *groups),
        window=width,
        limits=limits,
        scored=ranks.ratios,
    )


def _say_dropped(parts: Decomposed, notes: list[str]) -> None:
    dropped = len(parts.error) - len(parts.kept)
    if dropped:
        notes.append(
            f"{dropped} of {len(parts.error)} steps are not reproduced to "
            f"{whatif.MOST_ERROR * 100:g} % by their dependencies, and were left out"
        )
    if not len(parts.kept):
        notes.append("no step could be replayed: prices are missing")


# ---- what it would be without


@dataclass(slots=True)
class _Questions:
    """The variants that are replayed together, and the answers."""

    variants: list[Variant]
    outcome: whatif.Outcome | None = None

    def ask(self, variant: Variant) -> int:
        self.variants.append(variant)
        return len(self.variants) - 1

    def answer(self, parts: Decomposed) -> None:
        if len(parts.kept):
            self.outcome = whatif.outcome_of(parts, self.variants)

    def price(self, number: int | None) -> float | None:
        if number is None or self.outcome is None:
            return None
        return self.outcome.price(number)

    def saved(self, number: int | None) -> float:
        """The share of the job's time that this variant saves."""
        price = self.price(number)
        return 0.0 if price is None else max(0.0, price / (1 + price))


def _report(case: _Case, notes: list[str]) -> Report:
    trace, questions = case.trace, _Questions([])
    ideal = whatif.ideal(case.parts)
    whole = questions.ask(ideal)
    suspects = [_without(case, one) for one in case.suspects]
    of_suspects = [questions.ask(one) for one in suspects]
    culprits = questions.ask(whatif.together(suspects)) if suspects else None
    of_ranks = _ask_ranks(case, questions)
    of_operations = _ask_parts(questions, ideal, trace.table.op, case.parts)
    of_roles = _ask_parts(questions, ideal, case.row_role, case.parts)
    stages, stage_factors = _even_stages(case)
    even = questions.ask(stages) if stages is not None else None
    lengths = _even_lengths(case)
    even_lengths = questions.ask(lengths) if lengths is not None else None
    transfers = np.flatnonzero(trace.kinds != Kind.COMPUTE)
    even_transfers = questions.ask(whatif.only(ideal, transfers))
    questions.answer(case.parts)
    findings = _findings(case, [questions.price(number) for number in of_suspects])
    causes = [("slow ranks", culprits), ("uneven stages", even),
              ("sequence lengths", even_lengths), ("transfers", even_transfers)]  # fmt: skip
    return Report(
        rows=len(trace.table),
        ranks=len(trace.ranks),
        steps=len(trace.steps),
        window_steps=case.window,
        roles=_counts(case),
        schedule=schedule_of(trace),
        step_s=float(np.median(case.parts.step_s)),
        slowdown_ratio=None if (price := questions.price(whole)) is None else 1 + price,
        replay_error_ratio=_median_error(case.parts),
        findings=findings,
        designs=_designs(case, stage_factors, questions.price(even), questions.price(even_lengths)),
        shares=_shares(questions, whole, causes),
        rank_rows=_rank_rows(case, {rank: questions.price(one) for rank, one in of_ranks.items()}),
        operations=_part_rows(case, trace.table.op, trace.table.ops, questions, of_operations),
        role_rows=_part_rows(case, case.row_role, case.roles, questions, of_roles),
        step_rows=_step_rows(case.parts, questions, whole),
        heat_map=_heat_map(case),
        notes=tuple(notes),
    )  # fmt: skip


def _without(case: _Case, suspect: Suspect) -> Variant:
    """The trace, with a suspect like its peers."""
    rows, peers = suspect.rows, suspect.peer_rows
    if suspect.kind == "rank":
        bad = [one.ranks[0] for one in case.suspects if one.kind == "rank"]
        trace, rank = case.trace, suspect.ranks[0]
        others = (case.role == case.role[rank]) & ~np.isin(np.arange(len(case.role)), bad)
        if not others.any():
            others = (case.role == case.role[rank]) & (np.arange(len(case.role)) != rank)
        rows, peers = np.flatnonzero(trace.rank == rank), np.flatnonzero(others[trace.rank])
    return whatif.like_peers(case.parts, rows, peers, case.amount)


def _ask_ranks(case: _Case, questions: _Questions) -> dict[int, int]:
    """The ranks that are the furthest behind their peers, found or not."""
    means = _row_means(case.scored)
    order = np.argsort(-np.nan_to_num(means, nan=-np.inf))[:_MOST_PRICED_RANKS]
    found = {}
    for rank in order[np.isfinite(means[order])]:
        others = (case.role == case.role[rank]) & (np.arange(len(case.role)) != rank)
        rows = np.flatnonzero(case.trace.rank == rank)
        peers = np.flatnonzero(others[case.trace.rank])
        variant = whatif.like_peers(case.parts, rows, peers, case.amount)
        found[int(rank)] = questions.ask(variant)
    return found


def _row_means(values: Array) -> Array:
    counted = np.isfinite(values)
    total = np.where(counted, values, 0.0).sum(axis=1)
    means: Array = np.where(counted.any(axis=1), total / np.maximum(counted.sum(axis=1), 1), np.nan)
    return means


def _ask_parts(
    questions: _Questions, ideal: Variant, key: Array, parts: Decomposed
) -> dict[int, int]:
    """The largest ones of a kind: operations, or roles."""
    weight = np.bincount(key, weights=parts.lag_s + parts.work_s)
    largest = np.argsort(-weight)[:_MOST_PRICED_PARTS]
    if len(weight) == 1:
        return {}
    return {
        int(one): questions.ask(whatif.only(ideal, np.flatnonzero(key == one))) for one in largest
    }


def _even_stages(case: _Case) -> tuple[Variant | None, Array]:
    """All roles of a pipeline with the same work a step, and by how much each has more now."""
    trace = case.trace
    compute = np.flatnonzero(trace.kinds == Kind.COMPUTE)
    staged = any(name.startswith("stage ") for name in case.roles)
    if len(case.roles) < 2 or not (staged or (trace.partner >= 0).any()):
        return None, np.ones(len(case.roles))
    by_rank = np.median(case.own.by_cause["compute"], axis=0)
    stage = np.array([np.median(by_rank[case.role == one]) for one in range(len(case.roles))])
    factors = stage / max(stage.mean(), 1e-12)
    if factors.min() <= 0:
        return None, np.ones(len(case.roles))
    return whatif.scaled(case.parts, compute, 1 / factors[case.row_role[compute]]), factors


def _even_lengths(case: _Case) -> Variant | None:
    """All sequences as long as the mean, where their lengths are known or show."""
    if (case.amount != 1).any():
        rows = np.flatnonzero(case.amount != 1)
        return whatif.scaled(case.parts, rows, 1 / case.amount[rows])
    if not lengths_vary(case.parts):
        return None
    trace = case.trace
    rows = np.flatnonzero((trace.kinds == Kind.COMPUTE) & (trace.table.microbatch >= 0))
    key = combined(trace.rank[rows], trace.table.op[rows])
    means = means_by(key, case.parts.work_s[rows], int(key.max()) + 1)[key]
    return Variant(rows, case.parts.lag_s[rows], means)


# ---- the parts of the report


def _findings(case: _Case, prices: Sequence[float | None]) -> tuple[Finding, ...]:
    trace = case.trace
    found = []
    for suspect, price in zip(case.suspects, prices, strict=True):
        ranks = tuple(int(trace.ranks[one]) for one in suspect.ranks)
        hosts = [trace.table.hosts[rank] for rank in ranks if rank in trace.table.hosts]
        found.append(
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
    return tuple(sorted(found, key=lambda one: -(one.price_ratio or one.slower_ratio)))


def _designs(
    case: _Case, factors: Array, stages: float | None, lengths: float | None
) -> tuple[Design, ...]:
    found = []
    worst = int(np.argmax(factors))
    if factors[worst] > 1 + _UNEVEN:
        ranks = tuple(int(one) for one in case.trace.ranks[case.role == worst])
        found.append(
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
        known = (case.amount != 1).any()
        how = "as their lengths say" if known else "forwards as backwards"
        found.append(
            Design(
                what="sequence lengths",
                role="",
                ranks=(),
                slower_ratio=lengths,
                price_ratio=lengths,
                reason=f"microbatches take unequal times, {how}; ranks wait for the longest",
            )
        )
    return tuple(found)


def _shares(
    questions: _Questions, whole: int, causes: Sequence[tuple[str, int | None]]
) -> tuple[Share, ...]:
    if questions.outcome is None:
        return ()
    found = [
        Share(cause=name, ratio=questions.saved(number))
        for name, number in causes
        if number is not None
    ]
    rest = questions.saved(whole) - sum(one.ratio for one in found)
    return (*found, Share(cause="rest", ratio=max(0.0, rest)))


def _rank_rows(case: _Case, prices: dict[int, float | None]) -> tuple[RankRow, ...]:
    trace = case.trace
    relative, individual = _scores(case)
    late = _lateness(trace)
    own, ratios = np.median(case.own.total_s, axis=0), _row_means(case.scored)
    return tuple(
        RankRow(
            rank=int(trace.ranks[one]),
            host=trace.table.hosts.get(int(trace.ranks[one]), ""),
            role=case.roles[int(case.role[one])],
            own_s=float(own[one]),
            slower_ratio=_number(ratios[one]),
            late_s=_number(late[one]),
            relative_score=_number(relative[one]),
            individual_score=_number(individual[one]),
            price_ratio=prices.get(one),
        )
        for one in range(len(trace.ranks))
    )


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _scores(case: _Case) -> tuple[Array, Array]:
    """NVRx's, as it would report the computations of the whole trace, and of its last window."""
    trace, ranks, ops = case.trace, len(case.trace.ranks), len(case.trace.table.ops)
    compute = np.flatnonzero((trace.kinds == Kind.COMPUTE) & (trace.table.duration > 0))
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


def _part_rows(
    case: _Case, key: Array, names: Sequence[str], questions: _Questions, asked: dict[int, int]
) -> tuple[PartRow, ...]:
    parts, steps = case.parts, len(case.trace.steps)
    own = np.bincount(key, weights=parts.lag_s + parts.work_s, minlength=len(names))
    members = combined(key, case.trace.rank)
    _, first = np.unique(members, return_index=True)
    ranks = np.maximum(np.bincount(key[first], minlength=len(names)), 1)
    kinds = dict(zip(key.tolist(), case.trace.kinds.tolist(), strict=True))
    rows = [
        PartRow(
            name=names[number],
            kind="" if names is case.roles else Kind(kind).name.lower(),
            own_s=float(own[number] / ranks[number] / steps),
            price_ratio=questions.price(asked.get(number)),
        )
        for number, kind in kinds.items()
    ]
    return tuple(sorted(rows, key=lambda one: -one.own_s))


def _step_rows(parts: Decomposed, questions: _Questions, whole: int) -> tuple[StepRow, ...]:
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


def _counts(case: _Case) -> dict[str, int]:
    counts = np.bincount(case.role, minlength=len(case.roles))
    return {name: int(count) for name, count in zip(case.roles, counts, strict=True)}


def _median_error(parts: Decomposed) -> float | None:
    known = parts.error[np.isfinite(parts.error)]
    return float(np.median(known)) if len(known) else None


def _heat_map(case: _Case) -> HeatMap:
    """By step, or by spans of steps where there are too many."""
    own = case.own.total_s
    width = -(-len(own) // _MOST_COLUMNS)
    columns = [own[at : at + width].mean(axis=0) for at in range(0, len(own), width)]
    total = np.array(columns)
    ratios = np.full(total.shape, np.nan)
    for role in range(len(case.roles)):
        members = np.flatnonzero(case.role == role)
        usual = np.median(total[:, members], axis=1)
        some = np.flatnonzero(usual > 0)
        ratios[np.ix_(some, members)] = total[np.ix_(some, members)] / usual[some, None]
    steps = case.trace.steps[case.own.steps[::width]]
    return HeatMap(
        ranks=tuple(int(one) for one in case.trace.ranks),
        steps=tuple(int(one) for one in steps),
        ratios=tuple(tuple(_number(one) for one in row) for row in ratios.T),
    )
