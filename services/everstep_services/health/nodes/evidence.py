"""What a fact says against a node, or takes back. What nobody can tell speaks against nobody."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.messages import (
    CheckResult,
    Fact,
    IncidentClosed,
    NodeCheckFinished,
    NodeLost,
    NodeReturned,
    StragglerFound,
    Strike,
    VerdictReached,
)
from everstep.messages.base import Time

HARDWARE_CAUSES = frozenset({"gpu", "network", "host"})
"""Cause classes of verdicts that speak against a node; any other blames somebody else."""
FAULTS = frozenset({"reset", "reboot", "drain", "replace"})
"""Classes of failed checks that speak against a node. `watch`, `report`, none at all, and what a
newer release may say, do not."""
SLOW_CAUSES = frozenset({"host", "device", "network"})
"""Causes of slow ranks that speak against a node; any other blames the script or its data."""
_FAILED = "failed"
_PASSED = frozenset({"ok", "warning", "unsupported"})
_SURE = 0.5


@dataclass(frozen=True, slots=True)
class Against:
    """What a fact changes: these strikes, in the place of those with these keys."""

    strikes: Mapping[str, Strike]
    """By node."""
    replaces: tuple[str, ...] = ()
    """Keys of strikes that are taken back, from whichever node."""
    revision: int = 0
    """Strikes of a later revision stay."""


def against(fact: Fact, now: Time) -> Against | None:
    """What it says, apart from the checks in it; None for nothing."""
    weigh = _WEIGHED.get(type(fact))
    return None if weigh is None else weigh(fact, min(fact.at, now))


def accused(fact: Fact) -> tuple[str, ...]:
    """The nodes whose standing it changes, on the word of its job; a person may name any."""
    match fact:
        case NodeCheckFinished() | NodeLost() | NodeReturned() | StragglerFound():
            return (fact.node,)
        case IncidentClosed():
            return () if fact.node is None else (fact.node,)
        case VerdictReached():
            return () if fact.is_corrected else fact.culprit_nodes
        case _:
            return ()


def faults(fact: NodeCheckFinished) -> dict[tuple[str, str], CheckResult]:
    """The failures that count, by check and part; of two about one part the first."""
    found: dict[tuple[str, str], CheckResult] = {}
    for result in fact.results:
        if result.state == _FAILED and result.failure_class in FAULTS:
            found.setdefault((result.check, result.subject), result)
    return found


def passed(fact: NodeCheckFinished) -> frozenset[str]:
    """The checks that ran, and could tell: what they do not call failed has not failed."""
    vague = {one.check for one in fact.results if one.state not in {*_PASSED, _FAILED}}
    return frozenset(fact.checks) - vague


def told(results: Iterable[CheckResult]) -> str:
    """What failed, in words."""
    said = [
        " ".join(filter(None, [one.check, one.subject, f"({one.failure_class})"]))
        + (f": {one.reason}" if one.reason else "")
        for one in results
    ]
    return "; ".join(said)


def _lost(fact: NodeLost, at: Time) -> Against:
    strike = Strike(key=fact.id, at=at, fact=fact.id, reason=f"lost by {fact.job}: {fact.reason}")
    return Against({fact.node: strike})


def _returned(fact: NodeReturned, _: Time) -> Against | None:
    """It was only not heard: that is nothing against it."""
    return Against({}, replaces=(fact.loss,)) if fact.how == "cut_off" and fact.loss else None


def _closed(fact: IncidentClosed, at: Time) -> Against | None:
    key = fact.trigger_fact or fact.incident
    if fact.verdict is not None or fact.outcome == "preempted":
        return Against({}, replaces=(key,))  # the verdict says whose fault it was
    if fact.trigger != "node_lost" or fact.node is None:
        return None
    strike = Strike(key=key, at=at, fact=fact.id, reason=f"lost by {fact.job}: {fact.cause}")
    return Against({fact.node: strike}, replaces=(key,))


def _judged(fact: VerdictReached, at: Time) -> Against:
    is_fault = fact.cause in HARDWARE_CAUSES and fact.confidence >= _SURE
    strikes = {
        node: Strike(
            key=fact.incident,
            at=at,
            fact=fact.id,
            reason=f"{fact.cause} in {fact.job}: {fact.reason}",
            revision=fact.revision,
        )
        for node in (fact.culprit_nodes if is_fault else ())
    }
    return Against(strikes, replaces=(fact.incident,), revision=fact.revision)


def _slow(fact: StragglerFound, at: Time) -> Against | None:
    """One strike for all findings of a job: a slow node does less harm than a broken one."""
    is_sure = fact.confidence is None or fact.confidence >= _SURE
    if fact.cause not in SLOW_CAUSES or not is_sure:
        return None
    strike = Strike(
        key=f"slow {fact.job} {fact.node}",
        at=at,
        fact=fact.id,
        reason=f"rank {fact.rank} of {fact.job} is slow ({fact.cause}): {fact.reason}",
    )
    return Against({fact.node: strike})


_WEIGHED: Mapping[type[Fact], Callable[[Any, Time], Against | None]] = {
    NodeLost: _lost,
    NodeReturned: _returned,
    IncidentClosed: _closed,
    StragglerFound: _slow,
    VerdictReached: _judged,
}
READ: tuple[type[Fact], ...] = (*_WEIGHED, NodeCheckFinished)
"""The kinds of facts that say something about nodes."""
