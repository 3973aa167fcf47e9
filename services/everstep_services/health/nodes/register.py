"""What speaks against each node, over all jobs: strikes, failing checks, suspicion.

The same facts in the same order make the same register, in whichever replica.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from everstep.messages import (
    CheckDistrusted,
    CheckTrusted,
    Fact,
    FailingCheck,
    NodeCheckFinished,
    NodeCleared,
    NodeRecord,
    NodesDocument,
    NodeSuspected,
    Strike,
)
from everstep.messages.base import Time
from everstep.subjects import CLUSTER
from everstep_services.health.nodes.distrust import NodeRules, Suspect, judged
from everstep_services.health.nodes.evidence import against, faults, passed, told

_STRIKES_MOST = 50
_REASON_MOST = 500
_NODES_MOST = 20_000
"""Its document must fit into one message. Whoever comes later is not remembered."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When it is, and what only the shell can make."""

    wall: Time
    """By our own wall clock: what it decides outlives every process."""
    new_id: Callable[[], str]

    def about(self) -> dict[str, Any]:
        """What every fact of health about nodes says."""
        return {"id": self.new_id(), "job": CLUSTER, "at": self.wall, "source": "health"}

    def since_s(self, then: Time) -> float:
        """How long ago that was."""
        return (self.wall - then).total_seconds()


class Register:
    """All nodes. Whoever changes it writes its document, or drops both."""

    def __init__(self, document: NodesDocument, rules: NodeRules) -> None:
        self.rules = rules
        self.nodes: dict[str, NodeRecord] = {one.node: one for one in document.nodes}
        self.distrusted = set(document.distrusted)
        self.opened_at = document.breaker_opened_at
        self.closed_at = document.breaker_closed_at
        self.facts: list[Fact] = []
        """What was decided since it was made."""
        self.is_changed = False

    def document(self, stream: str, sequence: int, outbox: tuple[str, ...]) -> NodesDocument:
        """All of it, as of this place in the stream of facts."""
        return NodesDocument(
            nodes=tuple(self.nodes.values()),
            stream=stream,
            sequence=sequence,
            distrusted=tuple(sorted(self.distrusted)),
            breaker_opened_at=self.opened_at,
            breaker_closed_at=self.closed_at,
            outbox=outbox,
        )

    def record(self, node: str) -> NodeRecord:
        """What is known of it."""
        return self.nodes.get(node) or NodeRecord(node=node)

    def put(self, record: NodeRecord) -> None:
        """Remember it so."""
        if record.node not in self.nodes and len(self.nodes) >= _NODES_MOST:
            return
        if self.nodes.get(record.node) != record:
            self.nodes[record.node] = record
            self.is_changed = True

    def say(self, fact: Fact) -> None:
        """Put it on record with the next write."""
        self.facts.append(fact)
        self.is_changed = True

    def take(self, fact: Fact, now: Moment) -> None:
        """What a fact says against a node, or for it."""
        if isinstance(fact, NodeCheckFinished):
            self._examined(fact, now)
            return
        found = against(fact, now.wall)
        if found is None:
            return
        kept = self._taken_back(found.replaces, found.revision)
        for node, strike in found.strikes.items():
            if strike.key not in kept:
                self._strike(node, strike)

    def judge(self, now: Moment) -> None:
        """Forget what is too old, and suspect the nodes that too much speaks against."""
        for record in list(self.nodes.values()):
            self._forget(record, now)
        for verdict in list(judged(self.nodes.values(), self.distrusted, self.rules)):
            self._trust(verdict, now)
        for record in list(self.nodes.values()):
            self._judge_node(record, now)

    def persistent(self, record: NodeRecord) -> list[FailingCheck]:
        """The checks that have failed for long enough, and count."""
        return [
            one
            for one in record.failing
            if one.windows >= self.rules.check_windows and one.result.check not in self.distrusted
        ]

    def strikes(self, record: NodeRecord) -> list[Strike]:
        """Those that count."""
        return [one for one in record.strikes if one.check not in self.distrusted]

    def forgive(self, node: str) -> None:
        """Somebody says that it is well: what was before counts no more."""
        record = self.nodes.get(node)
        if record is not None:
            self.put(replace(record, strikes=(), failing=(), is_undecided=False))

    def _strike(self, node: str, strike: Strike) -> None:
        record = self.record(node)
        if any(one.key == strike.key for one in record.strikes):
            return
        strike = replace(strike, reason=strike.reason[:_REASON_MOST])
        strikes = (*record.strikes, strike)[-_STRIKES_MOST:]
        self.put(replace(record, strikes=strikes, is_undecided=True))

    def _taken_back(self, keys: tuple[str, ...], revision: int) -> set[str]:
        """Drop the strikes with these keys; the keys of those that a later verdict has made."""
        kept: set[str] = set()
        for record in list(self.nodes.values()) if keys else ():
            with_key = [one for one in record.strikes if one.key in keys]
            kept |= {one.key for one in with_key if one.revision > revision}
            gone = [one for one in with_key if one.key not in kept]
            if gone:
                strikes = tuple(one for one in record.strikes if one not in gone)
                self.put(replace(record, strikes=strikes))
        return kept

    def _examined(self, fact: NodeCheckFinished, now: Moment) -> None:
        record, found, could_tell = self.record(fact.node), faults(fact), passed(fact)
        at = min(fact.at, now.wall)
        known = {(one.result.check, one.result.subject): one for one in record.failing}
        failing = [
            one for key, one in known.items() if key not in found and key[0] not in could_tell
        ]
        has_news = False
        for key, result in found.items():
            before = known.get(key)
            if before is None:
                one = FailingCheck(result=result, since=at, window_since=at, fact=fact.id)
                has_news = has_news or key[0] not in self.distrusted
            else:
                one = replace(before, result=result, fact=fact.id)
                if (at - before.window_since).total_seconds() >= self.rules.check_window_s:
                    one = replace(one, window_since=at, windows=before.windows + 1)
            failing.append(one)
        grown = any(one not in record.failing for one in failing)
        self.put(
            replace(
                record,
                checks=fact.checks or record.checks,
                checked_at=at,
                failing=tuple(failing),
                is_undecided=record.is_undecided or (grown and bool(found)),
            )
        )
        if has_news:
            new = next(key for key in found if key not in known and key[0] not in self.distrusted)
            reason = f"failed {told([found[new]])}"
            strike = Strike(key=fact.id, at=at, fact=fact.id, reason=reason, check=new[0])
            self._strike(fact.node, strike)

    def _forget(self, record: NodeRecord, now: Moment) -> None:
        rules = self.rules
        is_old = (
            record.checked_at is None or now.since_s(record.checked_at) > rules.strikes_window_s
        )
        if not (is_old or record.strikes or record.failing or record.exiles):
            return
        strikes = tuple(s for s in record.strikes if now.since_s(s.at) < rules.strikes_window_s)
        failing = tuple(
            f for f in record.failing if now.since_s(f.window_since) < rules.strikes_window_s
        )
        exiles = tuple(
            one
            for one in record.exiles
            if not one.is_over or now.since_s(one.at) < 4 * rules.strikes_window_s
        )
        record = replace(record, strikes=strikes, failing=failing, exiles=exiles)
        if is_old and not (strikes or failing or exiles or record.suspicion):
            del self.nodes[record.node]
            self.is_changed = True
        else:
            self.put(record)

    def _trust(self, found: Suspect, now: Moment) -> None:
        """A check is to blame, or is not any more."""
        if not found.is_everywhere:
            self.distrusted.discard(found.check)
            self.say(CheckTrusted(**now.about(), check=found.check, reason=found.reason))
            return
        self.distrusted.add(found.check)
        for record in list(self.nodes.values()):
            strikes = tuple(one for one in record.strikes if one.check != found.check)
            self.put(replace(record, strikes=strikes))
        self.say(
            CheckDistrusted(
                **now.about(),
                check=found.check,
                nodes_failed=found.failed,
                nodes_checked=found.ran,
                reason=found.reason,
            )
        )

    def _judge_node(self, record: NodeRecord, now: Moment) -> None:
        rules = self.rules
        lasting, strikes = self.persistent(record), self.strikes(record)
        cause, reason = "", ""
        if lasting:
            cause = "check"
            reason = f"failed in {lasting[0].windows} windows of {rules.check_window_s:g} s, limit "
            reason += f"{rules.check_windows}: {told([one.result for one in lasting])}"
        elif len(strikes) >= rules.strikes_limit:
            cause = "incidents"
            days = rules.strikes_window_s / 86400
            reason = f"{len(strikes)} strikes in {days:g} days, limit {rules.strikes_limit}: "
            reason += "; ".join(one.reason for one in strikes[-rules.strikes_limit :])
        if cause == record.cause:
            return
        if not cause:
            why = "its checks passed, or its strikes are too old or were taken back"
            self.say(
                NodeCleared(**now.about(), node=record.node, reason=why, suspicion=record.suspicion)
            )
            self.put(replace(record, suspicion="", cause="", reason="", is_undecided=False))
            return
        evidence = [*(one.fact for one in strikes), *(one.fact for one in lasting)]
        suspected = NodeSuspected(
            **now.about(),
            node=record.node,
            cause=cause,
            reason=reason[: 4 * _REASON_MOST],
            failure_class=lasting[0].result.failure_class if lasting else "",
            strikes=len(strikes),
            strikes_limit=rules.strikes_limit,
            window_s=rules.strikes_window_s,
            checks=tuple(one.result for one in lasting),
            evidence=tuple(evidence),
        )
        self.say(suspected)
        self.put(
            replace(
                record,
                suspicion=suspected.id,
                cause=cause,
                reason=reason[:_REASON_MOST],
                is_undecided=True,
            )
        )
