"""What was decided, and what came of it: both are on record."""

from typing import TypedDict, Unpack

from everstep.messages import ActionDecided, ActionTaken, Budget, OpenDecision, Option
from everstep_services.rendezvous.domain.batch import Batch


class Grounds(TypedDict, total=False):
    """What a decision rests on: fields of `action_decided`."""

    rule: str
    incident: str | None
    evidence: tuple[str, ...]
    missing: tuple[str, ...]
    considered: tuple[Option, ...]
    budgets: tuple[Budget, ...]
    nodes_out: tuple[str, ...]
    delay_s: float
    took_s: float


def decide_to(batch: Batch, action: str, reason: str, **grounds: Unpack[Grounds]) -> None:
    """Put on record what is going to be done; `came_of` says what became of it."""
    decision = OpenDecision(
        id=batch.record(ActionDecided(**batch.head(), action=action, reason=reason, **grounds)),
        action=action,
        decided_at=batch.now.wall,
        incident=grounds.get("incident"),
    )
    batch.timers.start("decided", decision.id)
    batch.state.set(decisions=(*batch.state.doc.decisions, decision))


def only_say(batch: Batch, action: str, reason: str, **grounds: Unpack[Grounds]) -> None:
    """Put on record what would be done, if it were allowed."""
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


def is_open(batch: Batch, action: str) -> bool:
    """It was decided to do this, and it is not done."""
    return any(one.action == action for one in batch.state.doc.decisions)


def came_of(batch: Batch, outcome: str, reason: str, *actions: str) -> None:
    """What became of the decisions for these actions; of all that are open when none is named."""
    ended = [one for one in batch.state.doc.decisions if not actions or one.action in actions]
    if not ended:
        return
    for one in ended:
        batch.record(
            ActionTaken(
                **batch.head(),
                decision=one.id,
                action=one.action,
                outcome=outcome,
                reason=reason,
                incident=one.incident,
                took_s=_elapsed_s(batch, one),
            )
        )
        batch.timers.clear("decided", one.id)
    left = tuple(one for one in batch.state.doc.decisions if one not in ended)
    batch.state.set(decisions=left)


def _elapsed_s(batch: Batch, decision: OpenDecision) -> float:
    """By our own clock, if we decided it; else by the wall clock of whoever did."""
    decided = batch.timers.started_at("decided", decision.id)
    if decided is not None:
        return batch.now.s - decided
    return max((batch.now.wall - decision.decided_at).total_seconds(), 0.0)
