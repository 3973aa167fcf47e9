"""How long a job would take without its slow parts: variants of its trace, replayed together."""

from dataclasses import dataclass, replace

import numpy as np

from everstep_services.straggler.domain import whatif
from everstep_services.straggler.domain.arrays import combined, means_of, medians_of
from everstep_services.straggler.domain.case import TraceCase, row_means
from everstep_services.straggler.domain.dependencies import Trace
from everstep_services.straggler.domain.operations import Array, OperationKind
from everstep_services.straggler.domain.own_time import lengths_vary
from everstep_services.straggler.domain.suspects import TraceSuspect
from everstep_services.straggler.domain.whatif import Decomposed, Variant

_LEAST_PRICE = 5e-4
"""A price that people read as 0 %."""
_MOST_PRICED_RANKS = 16
_MOST_PRICED_PARTS = 12


@dataclass(slots=True)
class Questions:
    """The variants that are replayed together, and the answers."""

    variants: list[Variant]
    outcome: whatif.ReplayOutcome | None = None

    def ask(self, variant: Variant) -> int:
        self.variants.append(variant)
        return len(self.variants) - 1

    def answer(self, parts: Decomposed) -> None:
        if len(parts.kept):
            self.outcome = whatif.outcome_of(parts, self.variants)

    def change(self, number: int | None) -> float | None:
        """How much faster the job is with a variant; below 0 if it is slower."""
        return None if number is None or self.outcome is None else self.outcome.price(number)

    def price(self, number: int | None) -> float | None:
        """The same, of what can only save time: less than 0 is rounding."""
        change = self.change(number)
        return None if change is None else max(change, 0.0)

    def saved(self, number: int | None) -> float:
        """The share of the job's time that this variant saves."""
        price = self.price(number)
        return 0.0 if price is None else max(0.0, price / (1 + price))


def priced(case: TraceCase, notes: list[str]) -> TraceCase:
    """The case with those suspects only without whom the job would be faster."""
    bare, questions = without_gaps(case), Questions([])
    asked = [questions.ask(without(bare, suspect)) for suspect in case.suspects]
    questions.answer(bare.parts)
    prices = [questions.price(number) for number in asked]
    is_free = [price is not None and price < _LEAST_PRICE for price in prices]
    if not any(is_free):
        return case
    suspects = [*zip(case.suspects, is_free, strict=True)]
    free = {rank for suspect, is_it in suspects if is_it for rank in suspect.ranks}
    kept = tuple(suspect for suspect, is_it in suspects if not is_it)
    ranks = ", ".join(str(int(case.trace.ranks[rank])) for rank in sorted(free)[:8])
    notes.append(f"ranks {ranks} take longer than their peers, and no rank waits for them")
    return replace(case, suspects=kept)


def without_gaps(case: TraceCase) -> TraceCase:
    """The case without time between operations, or in transfers with nobody, without explanation.

    It is a wait for something that is not in the table, as often as time of a rank's own. What a
    suspect has more of it than its peers remains.
    """
    parts, gap = case.parts, case.trace.table.gap
    lag_s = np.zeros(len(parts.lag_s)) if gap is None else np.where(gap < 0, 0.0, parts.lag_s)
    for suspect in case.suspects:
        if suspect.cause in {"host", "unknown"}:
            alike = without(case, suspect)
            excess = np.maximum(parts.lag_s[alike.rows] - alike.lag_s, 0.0)
            lag_s[alike.rows] = np.maximum(lag_s[alike.rows], excess)
    work_s, alone = parts.work_s.copy(), np.flatnonzero(_is_alone(case.trace))
    op = case.trace.table.op[alone]
    work_s[alone] = np.minimum(work_s[alone], medians_of(op, work_s[alone]))
    return replace(case, parts=replace(parts, lag_s=lag_s, work_s=work_s))


def _is_alone(trace: Trace) -> Array:
    """Whether each row is a transfer of whose ranks the table has one."""
    key = trace.collective
    members = np.bincount(key[key >= 0], minlength=1)
    unmatched = (trace.kinds != OperationKind.COMPUTE) & (trace.partner < 0)
    alone: Array = unmatched & ((key < 0) | (members[key] == 1))
    return alone


def without(case: TraceCase, suspect: TraceSuspect) -> Variant:
    """The trace, with a suspect like its peers."""
    rows, peers = suspect.rows, suspect.peer_rows
    if suspect.kind == "rank":
        bad = [suspect.ranks[0] for suspect in case.suspects if suspect.kind == "rank"]
        trace, rank = case.trace, suspect.ranks[0]
        others = (case.role == case.role[rank]) & ~np.isin(np.arange(len(case.role)), bad)
        if not others.any():
            others = (case.role == case.role[rank]) & (np.arange(len(case.role)) != rank)
        rows, peers = np.flatnonzero(trace.rank == rank), np.flatnonzero(others[trace.rank])
    by_rank = suspect.kind == "rank"
    return whatif.like_peers(case.parts, rows, peers, case.amount, by_rank=by_rank)


def ask_ranks(case: TraceCase, questions: Questions) -> dict[int, int]:
    """The ranks that are the furthest behind their peers, found or not."""
    means = row_means(case.scored)
    order = np.argsort(-np.nan_to_num(means, nan=-np.inf))[:_MOST_PRICED_RANKS]
    numbers = {}
    for rank in order[np.isfinite(means[order])]:
        others = (case.role == case.role[rank]) & (np.arange(len(case.role)) != rank)
        rows = np.flatnonzero(case.trace.rank == rank)
        peers = np.flatnonzero(others[case.trace.rank])
        variant = whatif.like_peers(case.parts, rows, peers, case.amount)
        numbers[int(rank)] = questions.ask(variant)
    return numbers


def ask_parts(
    questions: Questions, ideal: Variant, key: Array, parts: Decomposed
) -> dict[int, int]:
    """The largest ones of a kind: operations, or roles."""
    weight = np.bincount(key, weights=parts.lag_s + parts.work_s)
    largest = np.argsort(-weight)[:_MOST_PRICED_PARTS]
    if len(weight) == 1:
        return {}
    return {
        int(part): questions.ask(whatif.only(ideal, np.flatnonzero(key == part)))
        for part in largest
    }


def even_stages(case: TraceCase) -> tuple[Variant | None, Array]:
    """All roles of a pipeline with the same work a step, and by how much each has more now."""
    trace = case.trace
    compute = np.flatnonzero(trace.kinds == OperationKind.COMPUTE)
    staged = any(name.startswith("stage ") for name in case.roles)
    if len(case.roles) < 2 or not (staged or (trace.partner >= 0).any()):
        return None, np.ones(len(case.roles))
    by_rank = np.median(case.own_time.by_cause["compute"], axis=0)
    stage = np.array([np.median(by_rank[case.role == number]) for number in range(len(case.roles))])
    factors = stage / max(stage.mean(), 1e-12)
    if factors.min() <= 0:
        return None, np.ones(len(case.roles))
    return whatif.scaled(case.parts, compute, 1 / factors[case.row_role[compute]]), factors


def even_lengths(case: TraceCase) -> Variant | None:
    """All sequences as long as the mean, where their lengths are known or show."""
    if (case.amount != 1).any():
        rows = np.flatnonzero(case.amount != 1)
        return whatif.scaled(case.parts, rows, 1 / case.amount[rows])
    if not lengths_vary(case.parts):
        return None
    trace = case.trace
    rows = np.flatnonzero((trace.kinds == OperationKind.COMPUTE) & (trace.table.microbatch >= 0))
    key = combined(trace.rank[rows], trace.table.op[rows])
    return Variant(rows, case.parts.lag_s[rows], means_of(key, case.parts.work_s[rows]))
