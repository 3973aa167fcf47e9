"""What was decided, and what came of it: both are on record."""

from typing import Any

from everstep.messages import ActionDecided, ActionTaken, OpenDecision
from everstep_services.rendezvous.domain.batch import Turn


def decide_to(turn: Turn, action: str, reason: str, **fields: Any) -> None:
    """Put on record what is going to be done; `came_of` says what became of it."""
    decision = OpenDecision(
        id=turn.fact(ActionDecided, action=action, reason=reason, **fields),
        action=action,
        decided_at=turn.now.wall,
        incident=fields.get("incident"),
    )
    turn.since("decided", decision.id)
    turn.state.set(decisions=(*turn.state.doc.decisions, decision))


def only_say(turn: Turn, action: str, reason: str, **fields: Any) -> None:
    """Put on record what would be done, if it were allowed."""
    decision = turn.fact(ActionDecided, action=action, reason=reason, mode="observe", **fields)
    turn.fact(
        ActionTaken,
        decision=decision,
        action=action,
        outcome="observed",
        reason="nothing was done: it only observes",
        incident=fields.get("incident"),
    )


def is_open(turn: Turn, action: str) -> bool:
    """It was decided to do this, and it is not done."""
    return any(one.action == action for one in turn.state.doc.decisions)


def came_of(turn: Turn, outcome: str, reason: str, *actions: str) -> None:
    """What became of the decisions for these actions; of all that are open when none is named."""
    ended = [one for one in turn.state.doc.decisions if not actions or one.action in actions]
    if not ended:
        return
    for one in ended:
        turn.fact(
            ActionTaken,
            decision=one.id,
            action=one.action,
            outcome=outcome,
            reason=reason,
            incident=one.incident,
            took_s=_elapsed_s(turn, one),
        )
        turn.memory.forget("decided", one.id)
    left = tuple(one for one in turn.state.doc.decisions if one not in ended)
    turn.state.set(decisions=left)


def _elapsed_s(turn: Turn, decision: OpenDecision) -> float:
    """By our own clock, if we decided it; else by the wall clock of whoever did."""
    decided = turn.memory.known("decided", decision.id)
    if decided is not None:
        return turn.now.s - decided
    return max((turn.now.wall - decision.decided_at).total_seconds(), 0.0)
