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
from everstep_services.history.projections.common import Projection, fields_of, json_text


def _opened(changes: Changes, entry: LoggedFact, fact: IncidentOpened) -> None:
    changes.merge(JOBS, (fact.job,), incidents=1)
    progress = fact.last_progress_at
    progress_us = None if progress is None else to_us(progress)
    opened = fields_of(entry, INCIDENTS, "opened_fact", progress_us=progress_us)
    cause = fields_of(entry, INCIDENTS, "cause_order", cause_order=f"0/{fact.id}")
    _about(changes, entry, fact, **opened, **cause)


def _extended(changes: Changes, entry: LoggedFact, fact: IncidentExtended) -> None:
    nodes = json_text(fact.nodes)
    values = fields_of(entry, INCIDENTS, "extended_fact", nodes_affected=nodes)
    _about(changes, entry, fact, **values, ranks_affected=fact.ranks)


def _evidence(changes: Changes, entry: LoggedFact, fact: EvidenceCollected) -> None:
    if not fact.is_of_capture:
        _about(changes, entry, fact)
    values = fields_of(
        entry,
        EVIDENCE,
        kind=fact.evidence,
        stream=_stream(fact),
        missing_reason=fact.missing or None,
    )
    changes.merge(EVIDENCE, (fact.id,), **values)


def _stream(fact: EvidenceCollected) -> str | None:
    """The stream whose end it is; None when it is not of a stream, or of an unknown one."""
    stream = fact.summary.partition(":")[0] if fact.evidence == "log" else fact.evidence
    return stream if stream in {"stdout", "stderr"} else None


def _verdict(changes: Changes, entry: LoggedFact, fact: VerdictReached) -> None:
    order = f"{fact.is_corrected:d}/{fact.revision:020d}/{fact.id}"
    _about(
        changes, entry, fact, **fields_of(entry, INCIDENTS, "verdict_order", verdict_order=order)
    )
    values = fields_of(
        entry,
        VERDICTS,
        "",
        "verdict_",
        cause_kind=fact.kind or None,
        grounds=compact([_ground(item) for item in fact.evidence]),
        gaps=json_text(fact.missing),
    )
    changes.merge(VERDICTS, (fact.id,), **values)


def _ground(item: EvidenceItem) -> dict[str, Any]:
    return {
        "says": item.says, "analyzer": item.analyzer, "fact": item.fact, "weight": item.weight
    }  # fmt: skip


def _corrected(changes: Changes, entry: LoggedFact, fact: VerdictCorrected) -> None:
    _about(changes, entry, fact)
    changes.merge(CORRECTIONS, (fact.id,), **fields_of(entry, CORRECTIONS, "", "corrected_"))


def _closed(changes: Changes, entry: LoggedFact, fact: IncidentClosed) -> None:
    if fact.trigger:
        order = f"1/{fact.id}"
        cause = fields_of(entry, INCIDENTS, "cause_order", cause_order=order, reason=fact.cause)
        _about(changes, entry, fact, **cause)
    if fact.outcome == "merged":  # the other one counts for both
        changes.merge(JOBS, (fact.job,), incidents=-1)
    if fact.outcome == "recovered" and fact.lost_steps is None:
        changes.merge(JOBS, (fact.job,), unknown_losses=1)
    ledger = {**msgspec.structs.asdict(fact.ledger), "wall_s": fact.ledger.wall_s}
    values = fields_of(entry, INCIDENTS, "closed_fact", story=fact.reason, **ledger)
    _about(changes, entry, fact, **values)


def _decided(changes: Changes, entry: LoggedFact, fact: ActionDecided) -> None:
    if fact.budgets:
        budgets = json_text(fact.budgets)
        changes.merge(JOBS, (fact.job,), budgets_n=entry.n, budgets=budgets)
    values = fields_of(
        entry,
        ACTIONS,
        "",
        "decided_",
        decided_by=fact.source,
        unknowns=json_text(fact.missing),
        rests_on=json_text(fact.evidence),
        decide_s=fact.took_s,
    )
    changes.merge(ACTIONS, (fact.id,), **values)


def _taken(changes: Changes, entry: LoggedFact, fact: ActionTaken) -> None:
    values = fields_of(entry, ACTIONS, "taken_fact", "outcome_")
    about: dict[str, Value] = {"job": fact.job, "incident": fact.incident, "action": fact.action}
    changes.merge(ACTIONS, (fact.decision,), n=entry.n, **about, **values)


def _about(changes: Changes, entry: LoggedFact, fact: IncidentFact, **values: Value) -> None:
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
