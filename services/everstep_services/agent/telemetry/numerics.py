"""Makes facts of rank 0's reports about results that cannot be right, and incidents of cases.

Pure, but for the ids of facts. A report that cannot be read is dropped, with a line in the log.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep.clock import Clock
from everstep.ids import name_of_host, new_id
from everstep.incident_causes import NUMERICS
from everstep.incident_outcomes import IncidentOutcome
from everstep.messages import (
    Fact,
    IncidentClosed,
    IncidentOpened,
    Ledger,
    NumericsActed,
    NumericsCounted,
    NumericsFact,
    NumericsJudged,
    NumericsSuspected,
)
from everstep.messages.facts.numerics import told_act
from everstep_services.agent.telemetry.facts import AgentFacts
from trainer_sdk.wire import NumericsReported

log = logging.getLogger(__name__)

_ITEMS_MOST = 100
_TEXT_MOST = 2000
_FLOAT_MOST = 1e18
_CASES_MOST = 100
_KINDS: Mapping[str, type[Fact]] = {
    "suspected": NumericsSuspected,
    "judged": NumericsJudged,
    "acted": NumericsActed,
    "counted": NumericsCounted,
}
_OF_NO_RANK = frozenset({"correct_but_unexpected", "not_reproducible_and_not_local"})
"""Judgements whose ranks are only those on which the result was seen."""
_GOES_ON = frozenset({"again", "observe"})
"""Actions after which the round goes on. The others end it, but for a roll-back in place."""
_CERTAIN = frozenset({"nan", "inf", "replicas_differ"})
"""Signals that open an incident before they are judged: no healthy training has them."""


@dataclass(slots=True)
class _OpenCase:
    """The case whose incident is open."""

    case: str
    incident: str
    round: int
    since: float
    reason: str


class NumericsRecorder:
    """The unexpected results that rank 0 reports to one agent; at most one incident is open."""

    def __init__(self, records: AgentFacts, clock: Clock) -> None:
        self._records = records
        self._clock = clock
        self._open: _OpenCase | None = None
        self._ending: list[_OpenCase] = []
        """Those whose actions end the round: the incident of its end takes them over."""
        self._incidents: dict[str, str] = {}
        """The incidents of the newest cases."""
        self._unjudged: set[tuple[int, str]] = set()
        """Rounds and signals, or refused actions, that opened an incident without a judgement: each
        opens one."""
        self._suspected: NumericsSuspected | None = None
        """The newest one."""

    def heard(self, round: int, line: NumericsReported) -> list[Fact]:
        """The facts that follow from a report."""
        kind = _KINDS.get(line.event)
        if kind is None:
            log.info("unknown_numerics_event rank=%d event=%s", line.rank, line.event)
            return []
        body = {name: _bounded(value) for name, value in line.body.items()}
        if isinstance(node := body.get("node"), str) and node:
            body["node"] = name_of_host(node)
        head = {**self._records.of_round(round), "incident": self._incidents.get(_case(line))}
        try:
            fact = msgspec.convert(body | head, kind)
        except msgspec.ValidationError as error:
            log.warning(
                "numerics_event_unreadable rank=%d event=%s error=%s", line.rank, line.event, error
            )
            return []
        if not isinstance(fact, NumericsFact):
            return [fact]
        before: list[Fact] = []
        if self._open is not None and self._open.case != fact.case:
            before = self._closed("another unexpected result followed", "recovered", 0)
        return before + self._of_case(fact)

    def _of_case(self, fact: NumericsFact) -> list[Fact]:
        match fact:
            case NumericsSuspected(ranks=ranks):
                self._suspected = fact
                key = (fact.round, fact.signal)
                if fact.signal not in _CERTAIN or key in self._unjudged:
                    return [fact]
                self._unjudged.add(key)
                return self._opened(fact, fact.reason, ranks[0] if len(ranks) == 1 else fact.rank)
            case NumericsJudged(moved_from=None):
                if self._open is not None:
                    self._open.reason = fact.reason
                is_theirs = fact.kind not in _OF_NO_RANK
                rank = fact.ranks[0] if fact.ranks and is_theirs else None
                node = fact.node if fact.node and is_theirs else None
                return self._opened(fact, fact.reason, rank, node)
            case NumericsActed():
                facts = self._refused(fact) if fact.outcome == "refused" else [fact]
                return [*facts, *self._acted(fact)]
            case _:  # a result of before the ranks moved: the end of that round has its incident
                return [fact]

    def _refused(self, fact: NumericsActed) -> list[Fact]:
        """Somebody wanted an action, and the training goes on without it: that is an incident."""
        key = (fact.round, fact.action)
        is_told = fact.incident is not None or key in self._unjudged
        self._unjudged.add(key)
        if is_told:
            return [fact]
        suspected = self._suspected
        if suspected is None or suspected.case != fact.case:
            return self._opened(fact, f"at step {fact.step} a result is unexpected", None)
        return self._opened(fact, suspected.reason, suspected.rank)

    def _opened(
        self, fact: NumericsFact, reason: str, rank: int | None, node: str | None = None
    ) -> list[Fact]:
        """The fact, with the incident of its case, which is opened once."""
        if fact.incident is not None:
            return [fact]
        incident = self._incidents[fact.case] = new_id()
        if len(self._incidents) > _CASES_MOST:
            del self._incidents[next(iter(self._incidents))]
        self._open = _OpenCase(fact.case, incident, fact.round, self._clock.now(), reason)
        opened = IncidentOpened(
            **self._records.of_round(fact.round), incident=incident, trigger=NUMERICS,
            reason=reason, trigger_fact=fact.id, node=node, rank=rank, step=fact.step, phase="step",
        )  # fmt: skip
        return [opened, msgspec.structs.replace(fact, incident=incident)]

    def _acted(self, fact: NumericsActed) -> list[Fact]:
        if self._open is None:
            return []
        text = told_act(msgspec.structs.asdict(fact), self._open.reason)
        if fact.outcome == "done" and fact.action not in _GOES_ON and fact.to_step is None:
            self._open.reason += f"; {text}"
            self._ending.append(self._open)
            self._open = None
            return []
        outcome: IncidentOutcome = "failed" if fact.outcome == "refused" else "recovered"
        return self._closed(text, outcome, fact.lost_steps, fact.to_step)

    def ends(self, incident: str | None = None) -> list[Fact]:
        """The round has ended; the incident of its end takes over those that are open."""
        ending, self._ending = self._ending, []
        if self._open is not None:
            self._open.reason += "; the round ended"
            ending.append(self._open)
            self._open = None
        outcome: IncidentOutcome = "recovered" if incident is None else "merged"
        return [self._end_of(case, case.reason, outcome, into=incident) for case in ending]

    def _closed(
        self, text: str, outcome: IncidentOutcome, lost: int, restored: int | None = None
    ) -> list[Fact]:
        """The end of the open incident, if there is one."""
        case, self._open = self._open, None
        if case is None:
            return []
        reason = f"{case.reason}; {text}"
        return [self._end_of(case, reason, outcome, lost=lost, restored=restored)]

    def _end_of(
        self,
        case: _OpenCase,
        reason: str,
        outcome: IncidentOutcome,
        *,
        lost: int = 0,
        restored: int | None = None,
        into: str | None = None,
    ) -> IncidentClosed:
        return IncidentClosed(
            **self._records.of_round(case.round), incident=case.incident, outcome=outcome,
            reason=reason, restored_step=restored, lost_steps=lost, merged_into=into,
            next_round=case.round if into is None else None,
            ledger=Ledger(other_s=round(self._clock.now() - case.since, 3)),
        )  # fmt: skip


def steps_back(facts: Iterable[Fact]) -> int:
    """How many steps the training has gone back by what these facts report."""
    return sum(fact.lost_steps for fact in facts if isinstance(fact, NumericsActed))


def _case(line: NumericsReported) -> str:
    case = line.body.get("case")
    return case if isinstance(case, str) else ""


def _bounded(value: Any) -> Any:
    """A value of a report within the bounds of facts: a finite loss may be any number."""
    match value:
        case str():
            return value[:_TEXT_MOST]
        case float():
            return min(max(value, -_FLOAT_MOST), _FLOAT_MOST)
        case list():
            return [_bounded(item) for item in value[:_ITEMS_MOST]]
        case dict():
            return {name: _bounded(item) for name, item in value.items()}
        case _:
            return value
