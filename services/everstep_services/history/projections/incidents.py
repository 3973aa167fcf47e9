"""Projects incidents, their evidence and verdicts, and what was decided and done about them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from everstep.messages import (
    ActionDecided,
    ActionTaken,
    EvidenceCollected,
    EvidenceItem,
    Fact,
    IncidentClosed,
    IncidentExtended,
    IncidentFact,
    IncidentOpened,
    VerdictCorrected,
    VerdictReached,
)
from everstep.store.projected.changes import Changes, LoggedFact, Value, compact
from everstep.store.projected.incidents import ACTIONS, CORRECTIONS, EVIDENCE, INCIDENTS, VERDICTS
from everstep.store.projected.jobs import JOBS
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection, blob_text, parts


def _opened(changes: Changes, entry: LoggedFact, fact: IncidentOpened) -> None:
    changes.merge(JOBS, (fact.job,), incidents=1)
    progress = fact.last_progress_at
    _about(
        changes,
        entry,
        fact,
        opened_fact=fact.id,
        opened_us=to_us(fact.at),
        cause_order=f"0/{fact.id}",
        trigger=fact.trigger,
        reason=fact.reason,
        injected_by=fact.injected_by or None,
        trigger_fact=fact.trigger_fact,
        round=fact.round,
        node=fact.node,
        rank=fact.rank,
        step=fact.step,
        phase=fact.phase or None,
        section=fact.section,
        progress_us=None if progress is None else to_us(progress),
    )


def _extended(changes: Changes, entry: LoggedFact, fact: IncidentExtended) -> None:
    _about(
        changes,
        entry,
        fact,
        extended_fact=fact.id,
        extended_reason=fact.reason or None,
        nodes_affected=compact(fact.nodes),
        ranks_affected=fact.ranks,
    )


def _evidence(changes: Changes, entry: LoggedFact, fact: EvidenceCollected) -> None:
    if not fact.is_of_capture:
        _about(changes, entry, fact)
    changes.merge(
        EVIDENCE,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        incident=fact.incident,
        round=fact.round,
        at_us=to_us(fact.at),
        node=fact.node,
        rank=fact.rank,
        kind=fact.evidence,
        stream=_stream(fact),
        blob=blob_text(fact.blob),
        summary=fact.summary or None,
        missing_reason=fact.missing or None,
        took_s=fact.took_s,
    )


def _stream(fact: EvidenceCollected) -> str | None:
    """The stream whose end it is; None when it is not of a stream, or of an unknown one."""
    stream = fact.summary.partition(":")[0] if fact.evidence == "log" else fact.evidence
    return stream if stream in {"stdout", "stderr"} else None


def _verdict(changes: Changes, entry: LoggedFact, fact: VerdictReached) -> None:
    shared: dict[str, Value] = {
        "verdict_us": to_us(fact.at),
        "verdict_reason": fact.reason,
        "cause": fact.cause,
        "confidence": fact.confidence,
        "culprit_ranks": compact(fact.culprit_ranks),
        "culprit_nodes": compact(fact.culprit_nodes),
        "advice": fact.advice or None,
        "is_transient": fact.is_transient,
        "fingerprint": fact.fingerprint or None,
        "is_inconclusive": fact.is_inconclusive,
    }
    order = f"{fact.is_corrected:d}/{fact.revision:020d}/{fact.id}"
    _about(changes, entry, fact, verdict_order=order, verdict_fact=fact.id, **shared)
    changes.merge(
        VERDICTS,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        incident=fact.incident,
        revision=fact.revision,
        cause_kind=fact.kind or None,
        is_corrected=fact.is_corrected,
        retry=fact.retry or None,
        grounds=compact([_ground(item) for item in fact.evidence]),
        alternatives=parts(fact.alternatives),
        gaps=compact(fact.missing),
        analyzers=compact(fact.analyzers),
        explanation=fact.explanation or None,
        took_s=fact.took_s,
        **shared,
    )


def _ground(item: EvidenceItem) -> dict[str, Any]:
    return {
        "says": item.says, "analyzer": item.analyzer, "fact": item.fact, "weight": item.weight
    }  # fmt: skip


def _corrected(changes: Changes, entry: LoggedFact, fact: VerdictCorrected) -> None:
    _about(changes, entry, fact)
    changes.merge(
        CORRECTIONS,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        incident=fact.incident,
        corrected_us=to_us(fact.at),
        corrected_by=fact.by,
        cause=fact.cause,
        note=fact.note,
        culprit_ranks=compact(fact.culprit_ranks),
        culprit_nodes=compact(fact.culprit_nodes),
        was_cause=fact.was_cause or None,
        is_confirmation=fact.is_confirmation,
    )


def _closed(changes: Changes, entry: LoggedFact, fact: IncidentClosed) -> None:
    if fact.trigger:
        _about(
            changes,
            entry,
            fact,
            cause_order=f"1/{fact.id}",
            trigger=fact.trigger,
            reason=fact.cause,
            injected_by=fact.injected_by or None,
            trigger_fact=fact.trigger_fact,
            node=fact.node,
            rank=fact.rank,
        )
    if fact.outcome == "recovered" and fact.lost_steps is None:
        changes.merge(JOBS, (fact.job,), unknown_losses=1)
    _about(
        changes,
        entry,
        fact,
        closed_fact=fact.id,
        closed_us=to_us(fact.at),
        outcome=fact.outcome,
        story=fact.reason,
        **msgspec.structs.asdict(fact.ledger),
        wall_s=fact.ledger.wall_s,
        lost_steps=fact.lost_steps,
        lost_s=fact.lost_s,
        restored_step=fact.restored_step,
        restored_tier=fact.restored_tier or None,
        next_round=fact.next_round,
        reports=fact.reports,
        merged_into=fact.merged_into,
    )


def _decided(changes: Changes, entry: LoggedFact, fact: ActionDecided) -> None:
    budgets = parts(fact.budgets)
    if fact.budgets:
        changes.merge(JOBS, (fact.job,), budgets_n=entry.n, budgets=budgets)
    changes.merge(
        ACTIONS,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        incident=fact.incident,
        action=fact.action,
        round=fact.round,
        decided_us=to_us(fact.at),
        decided_by=fact.source,
        rule=fact.rule,
        mode=fact.mode,
        reason=fact.reason,
        budgets=budgets,
        considered=parts(fact.considered),
        unknowns=compact(fact.missing),
        rests_on=compact(fact.evidence),
        nodes_out=compact(fact.nodes_out),
        nodes_in=compact(fact.nodes_in),
        delay_s=fact.delay_s,
        decide_s=fact.took_s,
    )


def _taken(changes: Changes, entry: LoggedFact, fact: ActionTaken) -> None:
    changes.merge(
        ACTIONS,
        (fact.decision,),
        n=entry.n,
        job=fact.job,
        incident=fact.incident,
        action=fact.action,
        taken_fact=fact.id,
        taken_us=to_us(fact.at),
        outcome=fact.outcome,
        outcome_reason=fact.reason,
        took_s=fact.took_s,
    )


def _about(
    changes: Changes,
    entry: LoggedFact,
    fact: IncidentFact,
    **values: Value,
) -> None:
    changes.merge(INCIDENTS, (fact.job, fact.incident), first_n=entry.n, last_n=entry.n, **values)


PROJECTIONS: Mapping[type[Fact], Projection] = {
    IncidentOpened: _opened,
    IncidentExtended: _extended,
    EvidenceCollected: _evidence,
    VerdictReached: _verdict,
    VerdictCorrected: _corrected,
    IncidentClosed: _closed,
    ActionDecided: _decided,
    ActionTaken: _taken,
}
