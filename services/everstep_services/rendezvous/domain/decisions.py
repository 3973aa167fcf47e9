"""Records each decision and, later, its outcome."""

from typing import Literal, TypedDict, Unpack

from everstep.messages import ActionDecided, ActionTaken, Budget, OpenDecision, Option
from everstep_services.rendezvous.domain.batch import Batch

Action = Literal["restart", "wait", "stop", "exclude"]
Outcome = Literal["done", "failed", "overtaken"]


class Grounds(TypedDict, total=False):
    """The grounds of a decision: fields of `action_decided`."""

    rule: str
    incident: str | None
    evidence: tuple[str, ...]
    missing: tuple[str, ...]
    considered: tuple[Option, ...]
    budgets: tuple[Budget, ...]
    nodes_out: tuple[str, ...]
    delay_s: float
    took_s: float
    check: str


def decide_to(batch: Batch, action: Action, reason: str, **grounds: Unpack[Grounds]) -> None:
    """Record a decision that will be carried out; `came_of` records its outcome."""
    decision = OpenDecision(
        id=batch.record(ActionDecided(**batch.head(), action=action, reason=reason, **grounds)),
        action=action,
        decided_at=batch.now.wall,
        incident=grounds.get("incident"),
    )
    batch.timers.start("decided", decision.id)
    batch.state.set(decisions=(*batch.state.doc.decisions, decision))


def only_say(batch: Batch, action: Action, reason: str, **grounds: Unpack[Grounds]) -> None:
    """Record a decision that may not be carried out."""
    decision = batch.record(
        ActionDecided(**batch.head(), action=action, reason=reason, mode="observe", **grounds)
    )
    batch.record(
        ActionTaken(
            **batch.head(),
            decision=decision,
            action=action,
            outcome="observed",
            reason="nothing was done: it only observes",
            incident=grounds.get("incident"),
        )
    )


def is_open(batch: Batch, action: Action) -> bool:
    """Whether this action was decided, and has no outcome yet."""
    return any(decision.action == action for decision in batch.state.doc.decisions)


def came_of(batch: Batch, outcome: Outcome, reason: str, *actions: Action) -> None:
    """Record the outcome of open decisions for these actions, or of all if none is named."""
    ended = [
        decision
        for decision in batch.state.doc.decisions
        if not actions or decision.action in actions
    ]
    if not ended:
        return
    for decision in ended:
        batch.record(
            ActionTaken(
                **batch.head(),
                decision=decision.id,
                action=decision.action,
                outcome=outcome,
                reason=reason,
                incident=decision.incident,
                took_s=_elapsed_s(batch, decision),
            )
        )
        batch.timers.clear("decided", decision.id)
    left = tuple(decision for decision in batch.state.doc.decisions if decision not in ended)
    batch.state.set(decisions=left)


def _elapsed_s(batch: Batch, decision: OpenDecision) -> float:
    """Seconds by our own clock, if this replica decided it; else by the decider's wall clock."""
    decided = batch.timers.started_at("decided", decision.id)
    if decided is not None:
        return batch.now.s - decided
    return max((batch.now.wall - decision.decided_at).total_seconds(), 0.0)
