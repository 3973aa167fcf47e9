"""Earlier incidents of all jobs, and findings about nodes. Pure, and bounded."""

from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile
from typing import Literal

from everstep.messages import (
    Case,
    CasesDocument,
    Fact,
    IncidentClosed,
    NodeCheckFinished,
    NodeCleared,
    NodeSign,
    NodeSuspected,
    PastIncident,
    VerdictReached,
)
from everstep.messages.base import shared
from everstep.observe.printable import beginning

READ: tuple[type[Fact], ...] = (
    IncidentClosed, NodeCheckFinished, NodeCleared, NodeSuspected, VerdictReached,
)  # fmt: skip
"""The facts that are remembered beyond their job."""
_PAST_MOST = 2000
_NODES_MOST = 4096
_SIGNS_MOST = 8
_CULPRITS_MOST = 16
_FOR_A_CASE = 64
_TEXT_MOST = 240


def accused(fact: Fact) -> tuple[str, ...]:
    """The node that a fact of a job's agent is about, which all jobs will remember."""
    return (fact.node,) if isinstance(fact, NodeCheckFinished) else ()


def earlier(past: Iterable[PastIncident], incident: str) -> Iterator[PastIncident]:
    """The incidents that were judged before this one was judged for the first time."""
    return takewhile(lambda past_incident: past_incident.incident != incident, past)


class PastIncidents:
    """What attribution remembers beyond single jobs; it can be rebuilt from the stream."""

    def __init__(self, document: CasesDocument) -> None:
        self._past = {past.incident: past for past in document.past}
        self._signs: dict[str, list[NodeSign]] = {}
        for sign in document.nodes:
            self._signs.setdefault(sign.node, []).append(sign)

    @property
    def past(self) -> tuple[PastIncident, ...]:
        """Earlier incidents, the oldest first."""
        return tuple(self._past.values())

    @property
    def signs(self) -> tuple[NodeSign, ...]:
        """Return all findings about nodes."""
        return tuple(sign for signs in self._signs.values() for sign in signs)

    def take(self, fact: Fact, step: int | None = None) -> None:
        """Remember a fact; `step` is the last step of its job."""
        match fact:
            case VerdictReached():
                self._judged(fact, step)
            case IncidentClosed(outcome="merged"):
                self._past.pop(fact.incident, None)
            case NodeCheckFinished():
                self._checked(fact)
            case NodeSuspected():
                self._sign(_sign(fact, fact.node, "suspected", fact.reason))
            case NodeCleared():
                self._sign(_sign(fact, fact.node, "cleared", fact.reason))
            case _:
                pass

    def signs_of(self, case: Case) -> tuple[NodeSign, ...]:
        """Return the findings about the nodes of a case."""
        facts = {sign.fact for sign in case.nodes}
        return tuple(
            sign
            for member in case.members
            for sign in self._signs.get(member.node, ())
            if sign.fact not in facts
        )

    def before(self, case: Case, names: Collection[str]) -> tuple[PastIncident, ...]:
        """Earlier incidents of its job, of its nodes, and with one of these fingerprints."""
        nodes = {member.node for member in case.members}
        incidents = [
            past
            for past in earlier(self._past.values(), case.incident)
            if (past.job == case.job or past.fingerprint in names or nodes & set(past.nodes))
        ]
        return tuple(incidents[-_FOR_A_CASE:])

    def _judged(self, fact: VerdictReached, step: int | None) -> None:
        if fact.is_inconclusive:
            self._past.pop(fact.incident, None)
            return
        before = self._past.get(fact.incident)  # an incident that is judged again keeps its place
        self._past[fact.incident] = PastIncident(
            **shared(PastIncident, fact),
            ranks=fact.culprit_ranks[:_CULPRITS_MOST],
            nodes=fact.culprit_nodes[:_CULPRITS_MOST],
            step=step if before is None else before.step,
        )
        while len(self._past) > _PAST_MOST:
            del self._past[next(iter(self._past))]

    def _checked(self, fact: NodeCheckFinished) -> None:
        failed = [result for result in fact.results if result.state == "failed"]
        for result in failed[:_SIGNS_MOST]:
            self._sign(
                NodeSign(
                    node=fact.node, sign="check", fact=f"{fact.id}/{result.check}", at=fact.at,
                    reason=beginning(result.reason, _TEXT_MOST), check=result.check,
                    code=result.code[:_TEXT_MOST], failure_class=result.failure_class,
                )
            )  # fmt: skip
        bad = {result.check for result in fact.results if result.state in {"failed", "unknown"}}
        open_checks = {sign.check for sign in self._signs.get(fact.node, ()) if sign.check}
        for check in sorted((open_checks & set(fact.checks)) - bad):
            self._drop(fact.node, check)

    def _drop(self, node: str, check: str) -> None:
        """Drop the failures of a check that passes now."""
        left = [sign for sign in self._signs.get(node, []) if sign.check != check]
        if left:
            self._signs[node] = left
        else:
            self._signs.pop(node, None)

    def _sign(self, sign: NodeSign) -> None:
        signs = self._signs.pop(sign.node, [])
        if sign.sign == "cleared":
            signs = [earlier_sign for earlier_sign in signs if earlier_sign.sign != "suspected"]
        else:
            signs = [
                earlier_sign
                for earlier_sign in signs
                if (earlier_sign.sign, earlier_sign.check) != (sign.sign, sign.check)
            ]
            signs.append(sign)
        if signs:
            self._signs[sign.node] = signs[-_SIGNS_MOST:]
        while len(self._signs) > _NODES_MOST:
            del self._signs[next(iter(self._signs))]


def _sign(fact: Fact, node: str, sign: Literal["suspected", "cleared"], reason: str) -> NodeSign:
    return NodeSign(
        node=node, sign=sign, reason=beginning(reason, _TEXT_MOST), fact=fact.id, at=fact.at
    )
