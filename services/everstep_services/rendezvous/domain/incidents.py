"""Incidents: one from the first bad report to the next good step, however many reports come."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from msgspec.structs import replace

from everstep.incident_causes import CONSEQUENCE, PLAIN, SECONDARY, IncidentCause, meaning_of
from everstep.incident_outcomes import IncidentOutcome
from everstep.lost_steps import steps_again
from everstep.messages import IncidentClosed, IncidentExtended, IncidentOpened, Ledger
from everstep.messages.base import Time, earlier, shared
from everstep.messages.documents.rounds import FirstCause, OpenIncident
from everstep_services.rendezvous.domain.batch import Batch

LedgerEntry = Literal[
    "unfinished_s",
    "detect_s",
    "evidence_s",
    "decide_s",
    "stop_s",
    "rendezvous_s",
    "start_s",
    "restore_s",
    "heal_s",
    "first_step_s",
    "no_step_s",
    "other_s",
]
"""A field of `Ledger`."""
_Seconds = Mapping[LedgerEntry, float]

_NAMED_MOST = 100
_SAY_EVERY_S = 1.0
_REASON_MOST = 400
"""A reason of this length is not made longer by further nodes."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A report that something failed in the round."""

    trigger: IncidentCause
    reason: str
    node: str | None = None
    rank: int | None = None
    trigger_fact: str | None = None
    fingerprint: str = ""
    exit_code: int | None = None
    step: int | None = None
    is_of_code: bool = False
    asks: str = ""
    """As in `Report.asks`."""
    detect_s: float = 0.0
    """Seconds from the last progress, or from a rank's end, until now."""
    unfinished_s: float = 0.0
    """Seconds from the last progress until a rank's end."""
    check: str = ""
    accused: tuple[str, ...] = ()
    """For a failed check: the nodes on which it fails, while others pass it."""
    injected_by: str = ""
    """Who made the fault on purpose, where the reason names them."""
    is_later: bool = False
    """It happened after the round had ended, or only to an agent, and explains nothing."""

    @property
    def weight(self) -> int:
        """How well it explains other reports: a lost node explains the errors of its peers."""
        if self.is_later:
            return 0
        weight = meaning_of(self.trigger).weight
        is_consequence = weight == PLAIN and self.fingerprint.startswith(SECONDARY)
        return CONSEQUENCE if is_consequence else weight


def add(batch: Batch, sign: Sign) -> OpenIncident:
    """Open an incident for the sign, or add it to the open incident."""
    open_one = batch.state.doc.incident
    incident = _open(batch, sign) if open_one is None else _join(batch, open_one, sign)
    batch.state.set(incident=incident)
    is_another = open_one is not None and open_one.reason != incident.reason
    if is_another and batch.state.doc.phase == "ending":
        batch.state.set(end_reason=incident.reason)
        # Nobody needs to wait for the cause any more, and agents with an older cause get this one.
        batch.send(batch.stop_order())
    return incident


def broke_again(batch: Batch, sign: Sign) -> None:
    """Continue the open incident: a round ended before its first step, or while ranks stood still.

    The stall of those ranks came first. What a person wants then needs no decision.
    """
    doc = batch.state.doc
    assert doc.incident is not None
    if doc.incident.round == doc.round:
        stood = replace(_count(batch, doc.incident, "other_s"), stalled=())
        is_decided = not meaning_of(sign.trigger).opens_incident
        batch.state.set(incident=_told(replace(stood, is_decided=is_decided), sign))
        return
    entry: LedgerEntry = "start_s" if doc.phase == "forming" else "no_step_s"
    counted = replace(
        _count(batch, doc.incident, entry), stalled=(), is_decided=False, first=_cause(doc.incident)
    )
    batch.state.set(incident=_told(replace(counted, delay_s=0.0, weight=0), sign))


def formed(batch: Batch) -> None:
    """Note that the next round has formed."""
    incident = batch.state.doc.incident
    if incident is not None:
        batch.state.set(incident=_count_ending(batch, incident, "rendezvous_s"))


def started(batch: Batch) -> None:
    """Note that all ranks of the next round run."""
    incident = batch.state.doc.incident
    if incident is not None:
        batch.state.set(incident=_count(batch, incident, "start_s"))


def close(
    batch: Batch, outcome: IncidentOutcome, reason: str, entry: LedgerEntry, before_s: float = 0.0
) -> None:
    """Close the incident; the time until `before_s` ago goes into `entry`, or was a restore.

    A round that went on has restored nothing, and makes no step again. If the training is not back,
    what was under way counts before `entry`.

    A training that shows no steps was back when its first collective began, if that is known.
    """
    doc = batch.state.doc
    if doc.incident is None:
        return
    extend(batch, now=True)
    recovered = outcome == "recovered"
    went_on = recovered and doc.incident.round == doc.round
    moving = batch.timers.started_at("moving", doc.round)
    if not recovered:
        incident = _count_last(batch, doc.incident, entry)
    elif went_on:
        incident = _count(batch, doc.incident, entry, before_s=before_s)
    elif entry == "other_s" and moving is not None:
        before_s = batch.now.s - moving
        incident = _count(batch, doc.incident, "first_step_s", before_s=before_s)
    else:
        state: _Seconds = {"restore_s": doc.restore_s, "heal_s": doc.heal_s}
        incident = _count(batch, doc.incident, entry, state, before_s=before_s)
    cause = _cause(incident)
    again = 0 if went_on else steps_again(doc.first_step, doc.reached_step)
    batch.record(
        IncidentClosed(
            **batch.round_head(incident.round),
            incident=incident.id,
            outcome=outcome,
            reason=reason if incident.reason in reason else f"{incident.reason}; {reason}",
            ledger=incident.ledger,
            lost_steps=again if recovered else None,
            next_round=doc.round if recovered else None,
            reports=incident.reports,
            trigger=cause.trigger,
            cause=cause.reason,
            trigger_fact=cause.trigger_fact,
            node=cause.node,
            rank=cause.rank,
            injected_by=cause.injected_by,
        )
    )
    batch.timers.clear("counted", incident.id)
    batch.timers.clear("extended", incident.id)
    batch.state.set(incident=None)


def _cause(incident: OpenIncident) -> FirstCause:
    """The cause in the round that the incident ended."""
    return incident.first or FirstCause(**shared(FirstCause, incident))


def extend(batch: Batch, *, now: bool = False) -> None:
    """Record further reports, once a second at most."""
    incident = batch.state.doc.incident
    if incident is None or not (incident.unsaid or incident.unsaid_nodes):
        return
    batch.timers.start("extended", incident.id)
    waited_s = batch.timers.elapsed("extended", incident.id)
    if waited_s < _SAY_EVERY_S and not now:
        batch.wake_in(_SAY_EVERY_S - waited_s)
        return
    batch.record(
        IncidentExtended(
            **batch.head(),
            incident=incident.id,
            reports=incident.unsaid,
            nodes=incident.unsaid_nodes,
            ranks=incident.ranks,
            reason=f"{incident.reports} reports; the one that explains most: {incident.reason}",
            lost=incident.lost,
        )
    )
    batch.timers.restart("extended", incident.id)
    batch.state.set(incident=replace(incident, unsaid=(), unsaid_nodes=()))


def _open(batch: Batch, sign: Sign) -> OpenIncident:
    doc = batch.state.doc
    incident = OpenIncident(
        **shared(OpenIncident, sign),
        id=batch.now.new_id(),
        opened_at=batch.now.wall,
        round=doc.round,
        counted_until=batch.now.wall,
        ledger=Ledger(unfinished_s=sign.unfinished_s, detect_s=max(sign.detect_s, 0.0)),
        ranks=0 if sign.rank is None else 1,
        lost=_with_lost((), sign),
    )
    batch.timers.start("counted", incident.id, incident.counted_until)
    batch.timers.start("extended", incident.id)
    step = doc.round_step if sign.step is None else sign.step
    batch.record(
        IncidentOpened(
            **{**shared(IncidentOpened, sign), **batch.head(), "step": step},
            incident=incident.id,
            last_progress_at=_last_progress(batch, sign),
            phase="step"
            if doc.has_stepped
            else "start"
            if doc.phase == "forming"
            else "first_step",
        )
    )
    return incident


def _last_progress(batch: Batch, sign: Sign) -> Time | None:
    """When a rank that has stalled made its last progress; nobody else's is known so well."""
    if sign.trigger != "rank_stalled":
        return None
    return earlier(batch.now.wall, sign.detect_s)


def _join(batch: Batch, incident: OpenIncident, sign: Sign) -> OpenIncident:
    told = _told(incident, sign)
    causes = [(it.trigger_fact, it.node, it.lost) for it in (told, incident)]
    if causes[0] != causes[1]:
        batch.timers.restart("extended", incident.id, ago_s=_SAY_EVERY_S)
    return told


def _told(incident: OpenIncident, sign: Sign) -> OpenIncident:
    """Add a report; it becomes the cause if it explains the others better."""
    facts = (*incident.unsaid, *([sign.trigger_fact] if sign.trigger_fact else []))[:_NAMED_MOST]
    nodes = incident.unsaid_nodes
    if sign.node is not None and sign.node not in nodes:
        nodes = (*nodes, sign.node)[:_NAMED_MOST]
    incident = replace(
        incident,
        reports=incident.reports + 1,
        ranks=incident.ranks + (sign.rank is not None),
        unsaid=facts,
        unsaid_nodes=nodes,
    )
    incident = replace(incident, lost=_with_lost(incident.lost, sign))
    if sign.trigger == incident.trigger == "node_lost" and sign.weight == incident.weight:
        is_new = sign.node != incident.node and sign.reason not in incident.reason
        is_told = is_new and len(incident.reason) < _REASON_MOST  # nodes that fell together
        return (
            replace(incident, reason=f"{incident.reason}; {sign.reason}") if is_told else incident
        )
    if incident.is_decided or sign.weight <= incident.weight:
        return incident
    is_earlier = incident.first is not None and sign.weight > incident.first.weight
    first = None if is_earlier else incident.first
    return replace(incident, **shared(OpenIncident, sign), first=first)


def _with_lost(nodes: tuple[str, ...], sign: Sign) -> tuple[str, ...]:
    is_new = sign.trigger == "node_lost" and not sign.is_later and sign.node not in nodes
    return (*nodes, sign.node)[:_NAMED_MOST] if is_new and sign.node is not None else nodes


def _count(
    batch: Batch,
    incident: OpenIncident,
    entry: LedgerEntry,
    reported: _Seconds = MappingProxyType({}),
    *,
    before_s: float = 0.0,
) -> OpenIncident:
    """Count the time until `before_s` ago: what agents report of entries, and the rest for one."""
    left_s = max(_elapsed_s(batch, incident) - before_s, 0.0)
    entries: dict[LedgerEntry, float] = {}
    for name, reported_s in reported.items():
        entries[name] = min(max(reported_s, 0.0), left_s)
        left_s -= entries[name]
    entries[entry] = entries.get(entry, 0.0) + left_s
    before: Ledger = incident.ledger
    ledger = replace(
        before, **{name: getattr(before, name) + seconds for name, seconds in entries.items()}
    )
    batch.timers.clear("counted", incident.id)
    moved = replace(incident, ledger=ledger, counted_until=batch.now.wall)
    batch.timers.start("counted", incident.id, moved.counted_until)
    return moved


def _count_last(batch: Batch, incident: OpenIncident, entry: LedgerEntry) -> OpenIncident:
    """Count the time until the end of a job or an allocation that has made no step again."""
    doc = batch.state.doc
    if doc.phase == "forming":
        return _count(batch, incident, "start_s")
    if doc.phase == "running":
        return _count(batch, incident, entry if incident.round == doc.round else "no_step_s")
    if incident.is_decided:
        entry = "stop_s" if batch.state.count("stopping") else "rendezvous_s"
    return _count_ending(batch, incident, entry)


def _count_ending(batch: Batch, incident: OpenIncident, rest: LedgerEntry) -> OpenIncident:
    """Count the time since a round's end: as agents report it, and the rest.

    Agents collect evidence, then stop their ranks, in parallel; then the backoff runs.
    """
    reported: _Seconds = {
        "evidence_s": incident.evidence_s,
        "stop_s": incident.stop_s,
        "decide_s": incident.delay_s,
    }
    moved = _count(batch, incident, rest, reported)
    return replace(moved, evidence_s=0.0, stop_s=0.0)


def _elapsed_s(batch: Batch, incident: OpenIncident) -> float:
    """Seconds by our own clock, if we saw the beginning; else by the other replica's wall clock."""
    began = batch.timers.started_at("counted", incident.id, incident.counted_until)
    if began is not None:
        return batch.now.s - began
    return max((batch.now.wall - incident.counted_until).total_seconds(), 0.0)
