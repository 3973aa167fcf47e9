"""A trace of any origin: which rank is slow, for what cause, and at what price."""

import numpy as np

from everstep_services.straggler.domain import rows, whatif
from everstep_services.straggler.domain.case import (
    NothingToCompareError,
    TraceCase,
    case_of,
    complete,
    one_after_another,
)
from everstep_services.straggler.domain.collectives import aligned
from everstep_services.straggler.domain.dependencies import schedule_of, trace_of
from everstep_services.straggler.domain.operations import (
    OperationKind,
    Operations,
    without_enclosing,
)
from everstep_services.straggler.domain.prices import (
    Questions,
    ask_parts,
    ask_ranks,
    even_lengths,
    even_stages,
    priced,
    without,
    without_gaps,
)
from everstep_services.straggler.domain.report import TraceReport
from everstep_services.straggler.domain.verdict import SlownessLimits

__all__ = ["NothingToCompareError", "analyze"]

_LEAST_S = 1e-5
"""Every training has an operation that is longer."""


def analyze(
    table: Operations, limits: SlownessLimits | None = None, window: int | None = None
) -> TraceReport:
    """Judge a table of operations. Raises `NothingToCompareError`."""
    limits = limits or SlownessLimits()
    notes: list[str] = []
    _refuse_no_time(table)
    table = one_after_another(complete(table, notes), notes)
    table, enclosing = without_enclosing(table)
    if enclosing:
        notes.append(f"{enclosing} operations that enclose others were left out")
    table = complete(table, notes)
    table, clocks = aligned(table)
    if clocks is not None:
        apart = max(clocks.offsets_s.values()) - min(clocks.offsets_s.values())
        notes.append(
            f"clocks were up to {apart:.3g} s apart, and were aligned by collectives to "
            f"{clocks.error_s * 1000:.2g} ms"
        )
    parts = whatif.decompose(trace_of(table))
    case = case_of(parts, limits, window, notes)
    return _report(case, notes)


def _refuse_no_time(table: Operations) -> None:
    longest_s = float(table.duration.max(initial=0.0))
    if longest_s < _LEAST_S:
        raise NothingToCompareError(
            f"all its durations are 0 (the longest is {longest_s:.3g} s): are they in another unit "
            "(--unit)?"
        )


def _report(case: TraceCase, notes: list[str]) -> TraceReport:
    trace, questions = case.trace, Questions([])
    observed, case = case, without_gaps(priced(case, notes))
    ideal = whatif.ideal(case.parts)
    whole = questions.ask(ideal)
    suspects = [without(case, suspect) for suspect in case.suspects]
    of_suspects = [questions.ask(variant) for variant in suspects]
    culprits = questions.ask(whatif.together(suspects)) if suspects else None
    of_ranks = ask_ranks(case, questions)
    of_operations = ask_parts(questions, ideal, trace.table.op, case.parts)
    of_roles = ask_parts(questions, ideal, case.row_role, case.parts)
    stages, stage_factors = even_stages(case)
    even = questions.ask(stages) if stages is not None else None
    lengths = even_lengths(case)
    even_length = questions.ask(lengths) if lengths is not None else None
    transfers = np.flatnonzero(trace.kinds != OperationKind.COMPUTE)
    even_transfers = questions.ask(whatif.only(ideal, transfers))
    gaps = questions.ask(whatif.as_observed(observed.parts))
    questions.answer(case.parts)
    findings = rows.findings(case, [questions.price(number) for number in of_suspects])
    causes = [("slow ranks", culprits), ("uneven stages", even),
              ("sequence lengths", even_length), ("transfers", even_transfers)]  # fmt: skip
    notes += rows.gap_notes(questions.change(gaps), questions.change(whole))
    return TraceReport(
        rows=len(trace.table),
        ranks=len(trace.ranks),
        steps=len(trace.steps),
        window_steps=case.window,
        roles=rows.counts(case),
        schedule=schedule_of(trace),
        step_s=float(np.median(case.parts.step_s)),
        slowdown_ratio=None if (price := questions.change(whole)) is None else 1 + price,
        replay_error_ratio=rows.median_error(case.parts),
        findings=findings,
        designs=rows.designs(
            case, stage_factors, questions.price(even), questions.price(even_length)
        ),
        shares=rows.shares(questions, whole, causes),
        rank_rows=rows.rank_rows(
            case, {rank: questions.price(number) for rank, number in of_ranks.items()}
        ),
        operations=rows.part_rows(case, trace.table.op, trace.table.ops, questions, of_operations),
        role_rows=rows.part_rows(case, case.row_role, case.roles, questions, of_roles),
        step_rows=rows.step_rows(case.parts, questions, whole),
        heat_map=rows.heat_map(case),
        unjudged=case.unjudged,
        notes=tuple(notes),
    )  # fmt: skip
