"""The evidence against nodes in a fact, and what it takes back. Unknown causes blame no node."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

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
CORRUPTED = "silent_corruption"
"""The kind of a verdict on a device that computes wrongly and reports nothing."""
_FAILED = "failed"
_PASSED = frozenset({"ok", "warning", "unsupported"})
_SURE = 0.5
_UNHARMED = frozenset({"cut_off", "paused"})
"""The ways in which a lost node returns that show that nothing was wrong with it."""


@dataclass(frozen=True, slots=True)
class NodeEvidence:
    """The changes by a fact: `strikes` replace the strikes whose keys are in `replaces`."""

    strikes: Mapping[str, Strike]
    """By node."""
    replaces: tuple[str, ...] = ()
    """The keys, or the facts, of strikes to take back, from every node."""
    revision: int = 0
    """Strikes of a later revision stay."""
    event: str = ""
    """What the evidence is about: a node has one strike for it, however many report it."""
    excuses: str = ""
    """The node whose silence in this event is not a strike, or no longer."""
    is_verdict: bool = False
    """It explains the event: reports of lost nodes that come later are not strikes."""
    is_sure: bool = False
    """It rests on more than silence, so that nothing excuses the node."""


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


def _event(job: str, round: int | None, otherwise: str) -> str:
    """What ended this round: one event, however many report it."""
    return otherwise if round is None else f"{job} {round}"


def _lost(fact: NodeLost, at: Time) -> NodeEvidence | None:
    key = _event(fact.job, fact.round, fact.id)
    if fact.overload or fact.is_warden_alive:  # the silence tells nothing of the node
        return NodeEvidence({}, event=key, excuses=fact.node)
    if fact.is_replaced:  # the strike is that of the incident
        return None
    strike = _strike(fact, key, at, f"lost by {fact.job}: {fact.reason}")
    return NodeEvidence({fact.node: strike}, event=key)


def _returned(fact: NodeReturned, _: Time) -> NodeEvidence | None:
    """A node that was cut off or paused, and is back, has not failed."""
    if fact.how not in _UNHARMED or not fact.loss:
        return None
    key = _event(fact.job, fact.lost_round, fact.loss)
    return NodeEvidence({}, event=key, excuses=fact.node)


def _closed(fact: IncidentClosed, at: Time) -> NodeEvidence | None:
    key = _event(fact.job, fact.round, fact.trigger_fact or fact.incident)
    loss = () if fact.trigger_fact is None else (fact.trigger_fact,)
    if fact.verdict is not None or fact.outcome == "preempted":
        return NodeEvidence({}, replaces=(key, *loss), event=key, is_verdict=True)
    if "node" not in meaning_of(fact.trigger).fault or fact.node is None:
        return None
    event = "failed a check in" if fact.trigger == "check_failed" else "lost by"
    strike = _strike(fact, key, at, f"{event} {fact.job}: {fact.cause}")
    is_sure = fact.trigger == "check_failed"
    return NodeEvidence({fact.node: strike}, replaces=loss, event=key, is_sure=is_sure)


def _judged(fact: VerdictReached, at: Time) -> NodeEvidence:
    result = next((item.fact for item in fact.evidence if item.analyzer == "numerics"), None)
    if result is not None and fact.kind == CORRUPTED:
        return _corrupted(fact, f"{fact.job} {result}", at)
    event = _event(fact.job, fact.round, fact.incident)
    is_fault = fact.cause in HARDWARE_CAUSES and fact.confidence >= _SURE
    strike = _strike(fact, fact.incident, at, f"{fact.cause} in {fact.job}: {fact.reason}")
    strike = replace(strike, revision=fact.revision)
    return NodeEvidence(
        dict.fromkeys(fact.culprit_nodes if is_fault else (), strike),
        replaces=(fact.incident,) if is_fault else (fact.incident, event),
        revision=fact.revision,
        event=event,
        is_verdict=True,
        is_sure=fact.cause == "gpu" or fact.is_corrected,
    )


def _corrupted(fact: VerdictReached, event: str, at: Time) -> NodeEvidence:
    """A device computes wrongly: one strike for each judged result, also within a round.

    The round that ends because of it has a verdict of its own on the same result.
    """
    is_fault = fact.cause in HARDWARE_CAUSES and fact.confidence >= _SURE
    strike = replace(
        _strike(fact, fact.incident, at, f"{fact.cause} in {fact.job}: {fact.reason}"),
        revision=fact.revision,
        is_proof=fact.is_transient is False,
    )
    return NodeEvidence(
        dict.fromkeys(fact.culprit_nodes if is_fault else (), strike),
        replaces=(fact.incident,),
        revision=fact.revision,
        event=event,
        is_verdict=True,
    )


def _slow(fact: StragglerFound, at: Time) -> NodeEvidence | None:
    """One strike for all findings of a job: a slow node does less harm than a broken node."""
    is_sure = fact.confidence is None or fact.confidence >= _SURE
    if fact.cause not in SLOW_CAUSES or not is_sure:
        return None
    reason = f"rank {fact.rank} of {fact.job} is slow ({fact.cause}): {fact.reason}"
    strike = _strike(fact, f"slow {fact.job} {fact.node}", at, reason)
    return NodeEvidence({fact.node: strike})


def _strike(fact: Fact, key: str, at: Time, reason: str) -> Strike:
    return Strike(key=key, at=at, fact=fact.id, reason=reason)


_WEIGHED: Mapping[type[Fact], Callable[[Any, Time], NodeEvidence | None]] = {
    NodeLost: _lost,
    NodeReturned: _returned,
    IncidentClosed: _closed,
    StragglerFound: _slow,
    VerdictReached: _judged,
}
READ: tuple[type[Fact], ...] = (*_WEIGHED, ActionDecided, NodeCheckFinished)
"""The kinds of facts that the register reads."""
