"""What health finds about a node, and why. Every observer makes the same finding and id.

These ids follow from what a job's agents know; the ids of facts follow from them, with a key.
"""

from dataclasses import dataclass
from typing import Literal

from everstep.ids import id_from
from everstep.messages import NodeBeat

ReturnCause = Literal["restarted", "paused", "cut_off"]
"""Why a node was silent, in the words of `node_returned`."""
_TASKS_PER_CPU = 3.0
_LATE_S = 0.5
"""From these on, the processors of a node count as overloaded."""
_BLIND_S = 0.1
"""A shorter blindness of health explains no silence."""


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """A node was silent past its limit, and nothing explains that."""

    id: str
    beat: NodeBeat
    """The last beat before the loss, without its ranks."""
    silence_s: float
    limit_s: float
    blind_s: float
    reason: str
    is_warden_alive: bool = False
    """Only the agent is silent: health has waited for it, as the warden of its ranks answers."""
    is_replaced: bool = False
    """A newer round has formed without the node."""
    last_step: int | None = None
    """The last step that all ranks of the node had finished."""

    @property
    def overload(self) -> str:
        """Why the silence tells little of the node; empty if nothing is known."""
        beat, reasons = self.beat, []
        if beat.load_ratio >= _TASKS_PER_CPU:
            reasons.append(f"{beat.load_ratio:.1f} tasks for each processor of {beat.node}")
        if beat.late_s >= _LATE_S:
            reasons.append(f"{beat.node} had sent beats up to {beat.late_s:.1f} s late")
        if self.blind_s >= _BLIND_S:
            reasons.append(f"health was blind for {self.blind_s:.1f} s")
        return "; ".join(reasons)


@dataclass(frozen=True, slots=True)
class NodeReturn:
    """A node that was lost is heard again."""

    id: str
    beat: NodeBeat
    """The first beat after the loss."""
    away_s: float
    reason: str
    loss: str
    """The id of the loss that is over."""
    how: ReturnCause
    lost_round: int | None
    """The round in which the node was lost."""


Finding = NodeLoss | NodeReturn


def loss_of(
    beat: NodeBeat,
    silence_s: float,
    limit_s: float,
    *,
    blind_s: float,
    evidence: str,
    is_warden_alive: bool = False,
) -> NodeLoss:
    """The loss of the node whose last beat is `beat`."""
    state = f"its last beat: {beat.state}"
    if beat.round is not None:
        state += f", round {beat.round}" + ("" if beat.slot is None else f", slot {beat.slot}")
    if is_warden_alive:
        evidence += "; its warden answers: health has waited for its stopped agent"
    blind = f", without {blind_s:.1f} s in which health was blind" if blind_s >= _BLIND_S else ""
    # All observers hear the last beat, so their ids agree. Its time is part of the id, because an
    # agent that is started again counts its beats from the start.
    return NodeLoss(
        id=id_from("lost", beat.job, beat.node, str(beat.sequence), beat.at.isoformat()),
        beat=beat,
        silence_s=silence_s,
        limit_s=limit_s,
        blind_s=blind_s,
        reason=f"{beat.node} has been silent for {silence_s:.1f} s (limit {limit_s:g} s{blind}); "
        f"{state}; {evidence}",
        is_warden_alive=is_warden_alive,
    )


def return_of(loss: str, last: NodeBeat, beat: NodeBeat, away_s: float) -> NodeReturn:
    """The return of a node, from the last beat before its loss and the first after it."""
    how: ReturnCause
    missed = beat.sequence - last.sequence - 1
    if missed < 0:
        how, reason = "restarted", "its agent was started again"
    elif missed < away_s / 2:
        how = "paused"
        reason = f"its agent was paused: it sent {missed} beats in {away_s:.1f} s"
    else:
        how, reason = "cut_off", f"its agent ran on: {missed} beats did not get here"
    return NodeReturn(
        id=id_from("returned", loss),
        beat=beat,
        away_s=away_s,
        reason=reason,
        loss=loss,
        how=how,
        lost_round=last.round,
    )
