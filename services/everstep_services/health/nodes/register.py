"""The register of nodes: strikes, failing checks and suspicion of each, over all jobs.

The same facts in the same order make the same register in every replica.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from msgspec.structs import replace

from everstep.messages import (
    ActionDecided,
    CheckDistrusted,
    CheckResult,
    CheckTrusted,
    ConfirmedFailure,
    Exclusion,
    Fact,
    FailingCheck,
    NodeCheckFinished,
    NodeCleared,
    NodeRecord,
    NodesDocument,
    NodeStanding,
    NodeSuspected,
    Strike,
)
from everstep.messages.base import Time
from everstep.messages.facts.stamp import FactStamp
from everstep.subjects import CLUSTER
from everstep_services.health.nodes.evidence import (
    NodeEvidence,
    confirmed,
    described,
    evidence_in,
    faults,
    has_passed,
    passed,
)
from everstep_services.health.settings import NodeSettings

SuspicionCause = Literal["", "probe", "check", "incidents"]
"""What makes a node suspect, in the words of `node_suspected`; empty for nothing."""
_STRIKES_MOST = 50
_CONFIRMED_MOST = 20
_SETTLED_MOST = 1000
_ANY_REVISION = 1 << 30
_REASON_MOST = 500
_NODES_MOST = 20_000
"""The document must fit into one message. Nodes beyond this number are not remembered."""


@dataclass(frozen=True, slots=True)
class CheckTrust:
    """A check whose trust changes: a check that fails on too many nodes is to blame itself."""

    check: str
    failed: int
    ran: int
    is_distrusted: bool
    reason: str


class NodeRegister:
    """All nodes. A caller that changes it writes its document, or drops both."""

    def __init__(self, document: NodesDocument, settings: NodeSettings) -> None:
        self.settings = settings
        self.nodes: dict[str, NodeRecord] = {record.node: record for record in document.nodes}
        self.distrusted = set(document.distrusted)
        self.opened_at = document.breaker_opened_at
        self.closed_at = document.breaker_closed_at
        self.settled = document.settled
        self.facts: list[Fact] = []
        """The facts that were decided since the register was made."""
        self.is_changed = False

    def document(self, stream: str, sequence: int, outbox: tuple[str, ...]) -> NodesDocument:
        """The document to write, with its position in the stream of facts."""
        return NodesDocument(
            nodes=tuple(self.nodes.values()),
            stream=stream,
            sequence=sequence,
            distrusted=tuple(sorted(self.distrusted)),
            breaker_opened_at=self.opened_at,
            breaker_closed_at=self.closed_at,
            settled=self.settled,
            outbox=outbox,
        )

    def record(self, node: str) -> NodeRecord:
        """The record of a node; a blank one for an unknown node."""
        return self.nodes.get(node) or NodeRecord(node=node)

    def put(self, record: NodeRecord) -> None:
        """Keep a record."""
        if record.node not in self.nodes and len(self.nodes) >= _NODES_MOST:
            return
        if self.nodes.get(record.node) != record:
            self.nodes[record.node] = record
            self.is_changed = True

    def decide(self, fact: Fact) -> None:
        """Have a fact recorded with the next write."""
        self.facts.append(fact)
        self.is_changed = True

    def apply(self, fact: Fact, now: FactStamp) -> None:
        """Take in the evidence of a fact for or against a node."""
        if isinstance(fact, NodeCheckFinished):
            self._apply_checks(fact, now)
            return
        if isinstance(fact, ActionDecided):
            for node, failure in confirmed(fact, now.wall).items():
                self._confirm(node, failure)
            return
        evidence = evidence_in(fact, now.wall)
        if evidence is not None:
            self._weigh(evidence)

    def judge(self, now: FactStamp) -> None:
        """Forget old evidence, and suspect the nodes with too much of it."""
        for record in list(self.nodes.values()):
            self._forget(record, now)
        for trust in list(trust_changes(self.nodes.values(), self.distrusted, self.settings)):
            self._set_trust(trust, now)
        for record in list(self.nodes.values()):
            self._judge_node(record, now)

    def persistent(self, record: NodeRecord) -> list[FailingCheck]:
        """The trusted checks that have failed in enough windows."""
        return [
            failing
            for failing in record.failing
            if failing.windows >= self.settings.check_windows
            and failing.result.check not in self.distrusted
        ]

    def confirmed(self, record: NodeRecord) -> list[ConfirmedFailure]:
        """The failures of probes with the policy `exclude`, of trusted checks."""
        return [failure for failure in record.confirmed if failure.check not in self.distrusted]

    def strikes(self, record: NodeRecord) -> list[Strike]:
        """The strikes that count."""
        return [strike for strike in record.strikes if strike.check not in self.distrusted]

    def forgive(self, node: str) -> None:
        """Drop all evidence against a node: a person has included it."""
        record = self.nodes.get(node)
        if record is not None:
            self.put(replace(record, strikes=(), failing=(), confirmed=(), is_undecided=False))

    def _confirm(self, node: str, failure: ConfirmedFailure) -> None:
        """Note that a probe fails on this node only; a later failure of the check replaces it."""
        record = self.record(node)
        if any(earlier.fact == failure.fact for earlier in record.confirmed):
            return
        failure = replace(failure, reason=failure.reason[:_REASON_MOST])
        others = [earlier for earlier in record.confirmed if earlier.check != failure.check]
        kept = (*others, failure)[-_CONFIRMED_MOST:]
        self.put(replace(record, confirmed=kept, is_undecided=True))

    def _strike(self, node: str, strike: Strike) -> None:
        record = self.record(node)
        if any(earlier.key == strike.key for earlier in record.strikes):
            return
        strike = replace(strike, reason=strike.reason[:_REASON_MOST])
        strikes = (*record.strikes, strike)[-_STRIKES_MOST:]
        self.put(replace(record, strikes=strikes, is_undecided=True))

    def _weigh(self, evidence: NodeEvidence) -> None:
        kept = self._take_back(evidence.replaces, evidence.revision)
        event, is_over = evidence.event, evidence.event in self.settled
        if evidence.is_verdict:
            self._settle(event)
        if evidence.excuses:
            self._settle(f"{event} {evidence.excuses}")
            self._take_back((event,), _ANY_REVISION, evidence.excuses)
        for node, strike in evidence.strikes.items():
            is_excused = f"{event} {node}" in self.settled and not evidence.is_sure
            if strike.key in kept or is_excused or (is_over and not evidence.is_verdict):
                continue
            if event:
                self._take_back((event,), evidence.revision, node)
            self._strike(node, strike if evidence.is_sure else replace(strike, event=event))

    def _settle(self, event: str) -> None:
        if event not in self.settled:
            self.settled = (*self.settled, event)[-_SETTLED_MOST:]
            self.is_changed = True

    def _take_back(self, keys: tuple[str, ...], revision: int, node: str = "") -> set[str]:
        """Drop the strikes with these keys, facts or events, of one node or of all.

        Return the keys that a later verdict keeps.
        """
        kept: set[str] = set()
        records = [self.record(node)] if node else list(self.nodes.values())
        for record in records if keys else ():
            with_key = [s for s in record.strikes if {s.key, s.fact, s.event} & {*keys}]
            kept |= {strike.key for strike in with_key if strike.revision > revision}
            gone = [strike for strike in with_key if strike.key not in kept]
            if gone:
                strikes = tuple(strike for strike in record.strikes if strike not in gone)
                self.put(replace(record, strikes=strikes))
        return kept

    def _apply_checks(self, fact: NodeCheckFinished, now: FactStamp) -> None:
        record, failures, conclusive = self.record(fact.node), faults(fact), passed(fact)
        at = min(fact.at, now.wall)
        earlier = {(check.result.check, check.result.subject): check for check in record.failing}
        failing = [
            check
            for key, check in earlier.items()
            if key not in failures and key[0] not in conclusive
        ]
        has_news = False
        for key, result in failures.items():
            before = earlier.get(key)
            if before is None:
                check = FailingCheck(result=result, since=at, window_since=at, fact=fact.id)
                has_news = has_news or key[0] not in self.distrusted
            else:
                check = replace(before, result=result, fact=fact.id)
                if (at - before.window_since).total_seconds() >= self.settings.check_window_s:
                    check = replace(check, window_since=at, windows=before.windows + 1)
            failing.append(check)
        grown = any(check not in record.failing for check in failing)
        self.put(
            replace(
                record,
                checks=_checks_of(record, fact),
                is_unclear=not conclusive
                and (record.is_unclear if fact.occasion == "probe" else bool(fact.checks)),
                checked_at=at,
                failing=tuple(failing),
                confirmed=tuple(
                    failure for failure in record.confirmed if not has_passed(fact, failure.check)
                ),
                is_undecided=record.is_undecided or (grown and bool(failures)),
            )
        )
        if has_news:
            new = next(k for k in failures if k not in earlier and k[0] not in self.distrusted)
            reason = f"failed {described([failures[new]])}"
            strike = Strike(key=fact.id, at=at, fact=fact.id, reason=reason, check=new[0])
            self._strike(fact.node, strike)

    def _forget(self, record: NodeRecord, now: FactStamp) -> None:
        window_s = self.settings.strikes_window_s
        is_old = record.checked_at is None or now.since_s(record.checked_at) > window_s
        evidence = (record.strikes, record.failing, record.confirmed, record.exiles)
        if not (is_old or any(evidence)):
            return
        strikes = tuple(s for s in record.strikes if now.since_s(s.at) < window_s)
        failing = tuple(f for f in record.failing if now.since_s(f.window_since) < window_s)
        confirmed = tuple(f for f in record.confirmed if now.since_s(f.at) < window_s)
        exiles = tuple(
            exile
            for exile in record.exiles
            if not exile.is_over or now.since_s(exile.at) < 4 * window_s
        )
        record = replace(
            record, strikes=strikes, failing=failing, confirmed=confirmed, exiles=exiles
        )
        if is_old and not (strikes or failing or confirmed or exiles or record.suspicion):
            del self.nodes[record.node]
            self.is_changed = True
        else:
            self.put(record)

    def _set_trust(self, trust: CheckTrust, now: FactStamp) -> None:
        if not trust.is_distrusted:
            self.distrusted.discard(trust.check)
            head = now.head(CLUSTER)
            self.decide(CheckTrusted(**head, check=trust.check, reason=trust.reason))
            return
        self.distrusted.add(trust.check)
        for record in list(self.nodes.values()):
            strikes = tuple(strike for strike in record.strikes if strike.check != trust.check)
            self.put(replace(record, strikes=strikes))
        self.decide(
            CheckDistrusted(
                **now.head(CLUSTER),
                check=trust.check,
                nodes_failed=trust.failed,
                nodes_checked=trust.ran,
                reason=trust.reason,
            )
        )

    def _why(
        self,
        probes: Sequence[ConfirmedFailure],
        lasting: Sequence[FailingCheck],
        strikes: Sequence[Strike],
    ) -> tuple[SuspicionCause, str]:
        """The cause for which a node with this evidence is suspect, and the reason."""
        settings = self.settings
        if probes:
            return "probe", "; ".join(failure.reason for failure in probes)
        if lasting:
            windows = f"failed in {lasting[0].windows} windows of {settings.check_window_s:g} s"
            checks = described([check.result for check in lasting])
            return "check", f"{windows}, limit {settings.check_windows}: {checks}"
        if proofs := [strike.reason for strike in strikes if strike.is_proof]:
            return "incidents", "; ".join(proofs[-settings.strikes_limit :])
        if len(strikes) >= settings.strikes_limit:
            days = settings.strikes_window_s / 86400
            count = f"{len(strikes)} strikes in {days:g} days, limit {settings.strikes_limit}: "
            last = strikes[-settings.strikes_limit :]
            return "incidents", count + "; ".join(strike.reason for strike in last)
        return "", ""

    def _judge_node(self, record: NodeRecord, now: FactStamp) -> None:
        settings = self.settings
        probes, lasting, strikes = (
            self.confirmed(record), self.persistent(record), self.strikes(record),
        )  # fmt: skip
        cause, reason = self._why(probes, lasting, strikes)
        if cause == record.cause:
            return
        if not cause:
            why = "its checks passed, or its strikes are too old or were taken back"
            self.decide(
                NodeCleared(
                    **now.head(CLUSTER), node=record.node, reason=why, suspicion=record.suspicion
                )
            )
            self.put(replace(record, suspicion="", cause="", reason="", is_undecided=False))
            return
        evidence = [*(strike.fact for strike in strikes), *(check.fact for check in lasting)]
        for failure in probes:
            evidence += [failure.fact, *failure.evidence]
        suspected = NodeSuspected(
            **now.head(CLUSTER),
            node=record.node,
            cause=cause,
            reason=reason[: 4 * _REASON_MOST],
            failure_class=lasting[0].result.failure_class if lasting else "",
            strikes=len(strikes),
            strikes_limit=settings.strikes_limit,
            window_s=settings.strikes_window_s,
            checks=tuple(check.result for check in lasting),
            evidence=tuple(evidence),
        )
        self.decide(suspected)
        self.put(
            replace(
                record,
                suspicion=suspected.id,
                cause=cause,
                reason=reason[:_REASON_MOST],
                is_undecided=True,
            )
        )


def _checks_of(record: NodeRecord, fact: NodeCheckFinished) -> tuple[str, ...]:
    """The checks that run on a node; a probe is one of them, an examination names all."""
    if fact.occasion == "probe":
        return tuple(sorted({*record.checks, *fact.checks}))
    return fact.checks or record.checks


def trust_changes(
    records: Iterable[NodeRecord], distrusted: Collection[str], settings: NodeSettings
) -> Iterator[CheckTrust]:
    """The checks that must be distrusted from now on, or trusted again."""
    ran: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    examples: dict[str, CheckResult] = {}
    for record in records:
        failing = {
            failure.check: CheckResult(check=failure.check, state="failed", reason=failure.reason)
            for failure in record.confirmed
        }
        failing |= {check.result.check: check.result for check in record.failing}
        ran.update({*record.checks, *failing})
        failed.update(failing.keys())
        examples.update(failing)
    for check in sorted({*failed, *distrusted}):
        failures, nodes = failed[check], ran[check]
        least = max(settings.distrust_nodes, settings.distrust_ratio * nodes)
        is_distrusted = failures >= least
        if is_distrusted == (check in distrusted):
            continue
        share = f"{check} fails on {failures} of the {nodes} nodes on which it ran"
        limit = f"{settings.distrust_ratio:.0%} and {settings.distrust_nodes} nodes"
        reason = f"{share}, below {limit}: it counts again"
        if is_distrusted:
            reason = f"{share}; from {limit} on the check is to blame, and counts against no node"
            reason += f": {described([examples[check]])}"
        yield CheckTrust(check, failures, nodes, is_distrusted, reason)


StandingState = Literal["excluded", "lost", "suspect", "healthy", "unknown"]
"""The worst first."""
_STATES: tuple[str, ...] = get_args(StandingState)
_SHOWN_MOST = 2000
"""More would not fit into one message."""
Silences = Mapping[str, tuple[float, bool]]
"""How long each node is silent, and whether it is lost."""


def standings(
    nodes: Iterable[str],
    register: NodeRegister,
    exclusions: Iterable[Exclusion],
    silences: Silences,
    wall: Time,
) -> tuple[NodeStanding, ...]:
    """The standing of each of these nodes."""
    in_force = {e.node: e for e in exclusions if e.until is None or e.until > wall}
    rows = [_standing(node, register, in_force.get(node), silences) for node in set(nodes)]
    rows.sort(key=lambda row: (_STATES.index(row.state), -row.strikes, row.node))
    return tuple(rows[:_SHOWN_MOST])


def _standing(
    node: str, register: NodeRegister, exclusion: Exclusion | None, silences: Silences
) -> NodeStanding:
    record, silence = register.record(node), silences.get(node)
    state: StandingState = "unknown"
    reason = "health knows nothing of it" if silence is None else ""
    if silence is not None or record.checked_at is not None:
        state, reason = "healthy", ""
    if record.is_unclear:
        state, reason = "unknown", "none of its checks had a result"
    if record.suspicion:
        state, reason = "suspect", record.reason
    if silence is not None and silence[1]:
        state, reason = "lost", f"it has been silent for {silence[0]:.1f} s"
    if exclusion is not None:
        state, reason = "excluded", f"by {exclusion.by}: {exclusion.reason}"
    return NodeStanding(
        node=node,
        state=state,
        reason=reason,
        strikes=len(register.strikes(record)),
        silence_s=None if silence is None else round(silence[0], 3),
        failing=tuple(check.result for check in record.failing),
        exclusion=exclusion,
    )
