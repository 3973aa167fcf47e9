"""What health says about a node, why, and under which id: the same from every observer."""

import hashlib
from dataclasses import dataclass

from everstep.messages import NodeBeat


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing was heard of a node past the limit, and nothing explains it."""

    id: str
    beat: NodeBeat
    """The last that was heard."""
    silence_s: float
    limit_s: float
    blind_s: float
    reason: str

    @property
    def last_step(self) -> int | None:
        """The last step that all of its ranks had finished."""
        return min((rank.step for rank in self.beat.ranks if rank.step is not None), default=None)


@dataclass(frozen=True, slots=True)
class Returned:
    """A node that had been lost is heard again."""

    id: str
    beat: NodeBeat
    """The first that was heard again."""
    away_s: float
    reason: str
    loss: str
    """The id of the finding that is over."""
    how: str
    """As in `node_returned`."""


Finding = Lost | Returned


def lost(beat: NodeBeat, silence_s: float, limit_s: float, *, blind_s: float, others: str) -> Lost:
    """The finding, from the last beat that was heard."""
    said = f"its last word: {beat.state}"
    if beat.round is not None:
        said += f", round {beat.round}" + ("" if beat.slot is None else f", slot {beat.slot}")
    apart = f", {blind_s:.1f} s of our own blindness not counted" if blind_s >= 0.1 else ""
    return Lost(
        id=_id("lost", beat.job, beat.node, str(beat.sequence), beat.at.isoformat()),
        beat=beat,
        silence_s=silence_s,
        limit_s=limit_s,
        blind_s=blind_s,
        reason=f"{beat.node} is silent for {silence_s:.1f} s (limit {limit_s:g} s{apart}); "
        f"{said}; {others}",
    )


def returned(loss: str, last: NodeBeat, beat: NodeBeat, away_s: float) -> Returned:
    """The finding, from the last beat before the loss and the first after it."""
    missed = beat.sequence - last.sequence - 1
    if missed < 0:
        how, reason = "restarted", "its agent was started anew"
    elif missed < away_s / 2:
        how = "paused"
        reason = f"its agent was paused: it sent {missed} beats in {away_s:.1f} s"
    else:
        how, reason = "cut_off", f"its agent ran on: {missed} beats did not get here"
    return Returned(
        id=_id("returned", loss), beat=beat, away_s=away_s, reason=reason, loss=loss, how=how
    )


def _id(*parts: str) -> str:
    # Of the last beat, which every observer heard: so that all of them make one fact. The sender's
    # time is in it because an agent that is started anew counts its beats from the start.
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
