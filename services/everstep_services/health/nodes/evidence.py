"""The evidence against nodes in a fact, and what it takes back. Unknown causes blame no node."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.incident_causes import meaning_of
from everstep.messages import (
    ActionDecided,
    CheckResult,
    ConfirmedFailure,
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
from everstep.messages.facts.incidents import CHECK_CONFIRMED

HARDWARE_CAUSES = frozenset({"gpu", "network", "host"})
"""Causes of verdicts that count against a node; all others lie elsewhere."""
FAULTS = frozenset({"reset", "reboot", "drain", "replace"})
"""Classes of failed checks that count against a node. `watch`, `report`, no class and unknown
classes do not."""
SLOW_CAUSES = frozenset({"host", "device", "network"})
"""Causes of slow ranks that count against a node; all others lie in the script or its data."""
_FAILED = "failed"
_PASSED = frozenset({"ok", "warning", "unsupported"})
_SURE = 0.5


@dataclass(frozen=True, slots=True)
class NodeEvidence:
    """The changes by a fact: `strikes` replace the strikes whose keys are in `replaces`."""

    strikes: Mapping[str, Strike]
    """By node."""
    replaces: tuple[str, ...] = ()
    """The keys of strikes to take back, from every node."""
    revision: int = 0
    """Strikes of a later revision stay."""


def evidence_in(fact: Fact, now: Time) -> NodeEvidence | None:
    """The evidence in a fact, but for that in checks; None if there is none."""
    weigh = _WEIGHED.get(type(fact))
    return None if weigh is None else weigh(fact, min(fact.at, now))


def accused(fact: Fact) -> tuple[str, ...]:
    """The nodes about which a job testifies in a fact; a person's verdict may name any node."""
    match fact:
        case NodeCheckFinished() | NodeLost() | NodeReturned() | StragglerFound():
            return (fact.node,)
        case IncidentClosed():
            return () if fact.node is None else (fact.node,)
        case VerdictReached():
            return () if fact.is_corrected else fact.culprit_nodes
        case ActionDecided():
            return fact.nodes_out if is_confirmed(fact) else ()
        case _:
            return ()


def faults(fact: NodeCheckFinished) -> dict[tuple[str, str], CheckResult]:
    """The failures that count, by check and part; the first of several about the same part."""
    failures: dict[tuple[str, str], CheckResult] = {}
    for result in fact.results:
        if result.state == _FAILED and result.failure_class in FAULTS:
            failures.setdefault((result.check, result.subject), result)
    return failures


def is_confirmed(fact: ActionDecided) -> bool:
    """Whether rendezvous has a node leave since its probe fails, and passes on another node."""
    return fact.rule == CHECK_CONFIRMED and fact.mode == "enforce" and bool(fact.check)


def confirmed(fact: ActionDecided, now: Time) -> dict[str, ConfirmedFailure]:
    """The failures of probes, by node, that rendezvous has compared with other nodes."""
    if not is_confirmed(fact):
        return {}
    failure = ConfirmedFailure(
        check=fact.check,
        at=min(fact.at, now),
        fact=fact.id,
        reason=f"{fact.job}: {fact.reason}",
        evidence=fact.evidence,
    )
    return dict.fromkeys(fact.nodes_out, failure)


def has_passed(fact: NodeCheckFinished, check: str) -> bool:
    """Whether this check has passed on all parts of the node."""
    failing = any(result.check == check and result.state == _FAILED for result in fact.results)
    return check in passed(fact) and not failing


def passed(fact: NodeCheckFinished) -> frozenset[str]:
    """The checks with a clear result: a part that they do not call failed has passed."""
    clear = {*_PASSED, _FAILED}
    vague = {result.check for result in fact.results if result.state not in clear}
    return frozenset(fact.checks) - vague


def described(results: Iterable[CheckResult]) -> str:
    """The failures in words."""
    texts = [
        " ".join(filter(None, [result.check, result.subject, f"({result.failure_class})"]))
        + (f": {result.reason}" if result.reason else "")
        for result in results
    ]
    return "; ".join(texts)


def _lost(fact: NodeLost, at: Time) -> NodeEvidence | None:
    if fact.is_replaced:  # the strike is that of the incident
        return None
    strike = Strike(key=fact.id, at=at, fact=fact.id, reason=f"lost by {fact.job}: {fact.reason}")
    return NodeEvidence({fact.node: strike})


def _returned(fact: NodeReturned, _: Time) -> NodeEvidence | None:
    """A node that was only cut off has not failed: take the strike of its loss back."""
    return NodeEvidence({}, replaces=(fact.loss,)) if fact.how == "cut_off" and fact.loss else None


def _closed(fact: IncidentClosed, at: Time) -> NodeEvidence | None:
    key = fact.trigger_fact or fact.incident
    if fact.verdict is not None or fact.outcome == "preempted":
        return NodeEvidence({}, replaces=(key,))  # the verdict names the cause
    if "node" not in meaning_of(fact.trigger).fault or fact.node is None:
        return None
    event = "failed a check in" if fact.trigger == "check_failed" else "lost by"
    strike = Strike(key=key, at=at, fact=fact.id, reason=f"{event} {fact.job}: {fact.cause}")
    return NodeEvidence({fact.node: strike}, replaces=(key,))


def _judged(fact: VerdictReached, at: Time) -> NodeEvidence:
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
    return NodeEvidence(strikes, replaces=(fact.incident,), revision=fact.revision)


def _slow(fact: StragglerFound, at: Time) -> NodeEvidence | None:
    """One strike for all findings of a job: a slow node does less harm than a broken node."""
    is_sure = fact.confidence is None or fact.confidence >= _SURE
    if fact.cause not in SLOW_CAUSES or not is_sure:
        return None
    strike = Strike(
        key=f"slow {fact.job} {fact.node}",
        at=at,
        fact=fact.id,
        reason=f"rank {fact.rank} of {fact.job} is slow ({fact.cause}): {fact.reason}",
    )
    return NodeEvidence({fact.node: strike})


_WEIGHED: Mapping[type[Fact], Callable[[Any, Time], NodeEvidence | None]] = {
    NodeLost: _lost,
    NodeReturned: _returned,
    IncidentClosed: _closed,
    StragglerFound: _slow,
    VerdictReached: _judged,
}
READ: tuple[type[Fact], ...] = (*_WEIGHED, ActionDecided, NodeCheckFinished)
"""The kinds of facts that the register reads."""
