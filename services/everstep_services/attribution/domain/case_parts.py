"""Parts of a case, made from facts. Their texts and their number are bounded for any input."""

from collections.abc import Iterable
from typing import Any, Literal

from msgspec.structs import replace

from everstep.messages import (
    Case,
    ErrorRecord,
    Fact,
    IncidentExtended,
    NodeSign,
    NumericsJudged,
    RankEnd,
    RankExited,
    RankStalled,
    Stall,
)
from everstep.messages.base import shared
from everstep.observe.printable import beginning

TEXT_MOST = 1024
SHORT_MOST = 240
_TRACEBACK_MOST = 4096


def rank_end(fact: RankExited, *, is_whole: bool) -> RankEnd:
    """The end of a rank; with its traceback if `is_whole`."""
    error = fact.error or ErrorRecord(name="", text="")
    most = TEXT_MOST if is_whole else SHORT_MOST
    texts = {"first_error": fact.first_error[:most]}
    return RankEnd(
        **{**shared(RankEnd, fact), **texts},
        fact=fact.id,
        error_name=error.name[:SHORT_MOST],
        error_text=error.text[:most],
        place=error.place[:SHORT_MOST],
        traceback=error.traceback[-_TRACEBACK_MOST:] if is_whole else "",
        chain=tuple(name[:SHORT_MOST] for name in error.chain[:8]),
        raised_at=error.at,
        asks=error.asks,
    )


def stall_of(fact: RankStalled) -> Stall:
    """A rank's stall."""
    texts = {
        "blocked_in": beginning(fact.blocked_in, SHORT_MOST),
        "process_state": fact.process_state[:8],
    }
    return Stall(**{**shared(Stall, fact), **texts}, fact=fact.id)


def node_sign(
    fact: Fact,
    node: str,
    sign: Literal["lost", "returned", "left"],
    reason: str,
    *,
    cause: str = "",
) -> NodeSign:
    """What happened to a node."""
    return NodeSign(
        node=node,
        sign=sign,
        reason=beginning(reason, TEXT_MOST),
        fact=fact.id,
        at=fact.at,
        cause=cause,
    )


def ended_again(case: Case, round_: int) -> Case:
    """The case, in which no node of this round has stopped yet if the incident ends it anew."""
    if round_ <= max(case.round, case.last_round):
        return case
    return replace(case, last_round=round_, stopped=())


def is_about(case: Case, fact: NumericsJudged) -> bool:
    """Whether ranks ended the round of a case because of a result.

    They may have moved to judge it in a later round, which has made no step yet.
    """
    if fact.moved_from is not None:
        return case.round == fact.moved_from
    return case.round == fact.round or (case.round < fact.round and case.outcome != "recovered")


def lost_together(fact: IncidentExtended, signs: Iterable[NodeSign]) -> tuple[NodeSign, ...]:
    """Rendezvous's nodes that fell together, where health has not told the loss, or tells none."""
    told = {sign.node for sign in signs if sign.sign == "lost"}
    new = [node for node in fact.lost if node not in told]
    gone = "is gone: its agent cannot be reached"
    return tuple(node_sign(fact, node, "lost", f"{node} {gone}") for node in new)


def without_loss(signs: Iterable[NodeSign], newer: NodeSign) -> tuple[NodeSign, ...]:
    """The signs without older ones of the same loss."""
    loss = (newer.node, newer.sign)
    return tuple(it for it in signs if it.fact == newer.fact or (it.node, it.sign) != loss)


def names_node(signs: Iterable[NodeSign], node: str) -> bool:
    """Whether one of the signs is about the node."""
    return any(sign.node == node for sign in signs)


def with_part(parts: tuple[Any, ...], part: Any, most: int) -> tuple[Any, ...]:
    """Add a part, unless it is there or there are too many: the first parts tell the most."""
    is_known = any(other.fact == part.fact for other in parts)
    return parts if is_known or len(parts) >= most else (*parts, part)
