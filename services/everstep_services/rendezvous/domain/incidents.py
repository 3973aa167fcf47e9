"""From the first bad report to the next good step: one incident, however many reports."""

from dataclasses import dataclass

from msgspec.structs import replace

from everstep.messages import IncidentClosed, IncidentExtended, IncidentOpened, Ledger
from everstep.messages.documents import OpenIncident
from everstep_services.rendezvous.domain.batch import Turn
from everstep_services.rendezvous.domain.budgets import SECONDARY
from everstep_services.rendezvous.domain.state import CONSEQUENCE, NODE, PLAIN

_NAMED_MOST = 100
_SAY_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Sign:
    """Something bad that was reported about the round."""

    trigger: str
    """As in `incident_opened`."""
    reason: str
    node: str | None = None
    rank: int | None = None
    fact: str | None = None
    fingerprint: str = ""
    exit_code: int | None = None
    step: int | None = None
    is_of_code: bool = False
    detect_s: float = 0.0
    """From the last progress until now."""

    @property
    def weight(self) -> int:
        """How well it explains the others: the loss of a node explains what its peers saw."""
        if self.trigger == "node_lost":
            return NODE
        return CONSEQUENCE if self.fingerprint.startswith(SECONDARY) else PLAIN


def add(turn: Turn, sign: Sign) -> OpenIncident:
    """The sign opens an incident, or belongs to the one that is open."""
    open_one = turn.state.doc.incident
    incident = _open(turn, sign) if open_one is None else _join(turn, open_one, sign)
    turn.state.set(incident=incident)
    is_another = open_one is not None and open_one.reason != incident.reason
    if is_another and turn.state.doc.phase == "ending":
        # Nobody needs to wait for the cause any more, and who was told another one is put right.
        turn.send(turn.stop_order())
    return incident


def broke_again(turn: Turn, sign: Sign) -> None:
    """A round has ended before its first step: the open incident goes on, with a new cause."""
    doc = turn.state.doc
    assert doc.incident is not None
    entry = "start_s" if doc.phase == "forming" else "first_step_s"
    counted = _count(turn, doc.incident, entry)
    turn.state.set(incident=_told(replace(counted, is_decided=False, delay_s=0.0, weight=0), sign))


def formed(turn: Turn) -> None:
    """The next round has formed."""
    incident = turn.state.doc.incident
    if incident is not None:
        turn.state.set(incident=_count_ending(turn, incident))


def started(turn: Turn) -> None:
    """All of its ranks run."""
    incident = turn.state.doc.incident
    if incident is not None:
        turn.state.set(incident=_count(turn, incident, "start_s"))


def close(turn: Turn, outcome: str, reason: str, entry: str) -> None:
    """It is over; the time since it was counted last goes into `entry`, or was a restore."""
    doc = turn.state.doc
    if doc.incident is None:
        return
    extend(turn, now=True)
    incident = _count(turn, doc.incident, entry, restore_s=doc.restore_s)
    recovered = outcome == "recovered"
    lost = 0
    if recovered and doc.last_step is not None and doc.first_step is not None:
        lost = max(doc.last_step - doc.first_step + 1, 0)
    turn.fact(
        IncidentClosed,
        incident=incident.id,
        outcome=outcome,
        reason=reason,
        ledger=incident.ledger,
        lost_steps=lost,
        next_round=doc.round if recovered else None,
        reports=incident.reports,
        round=incident.round,
        trigger=incident.trigger,
        cause=incident.reason,
        trigger_fact=incident.trigger_fact,
        node=incident.node,
        rank=incident.rank,
    )
    turn.memory.forget("counted", incident.id)
    turn.memory.forget("extended", incident.id)
    turn.state.set(incident=None)


def extend(turn: Turn, *, now: bool = False) -> None:
    """Say what else was reported, once a second at most."""
    incident = turn.state.doc.incident
    if incident is None or not (incident.unsaid or incident.unsaid_nodes):
        return
    waited_s = turn.since("extended", incident.id)
    if waited_s < _SAY_EVERY_S and not now:
        turn.wake_in(_SAY_EVERY_S - waited_s)
        return
    turn.fact(
        IncidentExtended,
        incident=incident.id,
        reports=incident.unsaid,
        nodes=incident.unsaid_nodes,
        ranks=incident.ranks,
        reason=f"{incident.reports} reports; the cause seems to be: {incident.reason}",
    )
    turn.memory.forget("extended", incident.id)
    turn.since("extended", incident.id)
    turn.state.set(incident=replace(incident, unsaid=(), unsaid_nodes=()))


def _open(turn: Turn, sign: Sign) -> OpenIncident:
    doc = turn.state.doc
    incident = OpenIncident(
        id=turn.now.new_id(),
        trigger=sign.trigger,
        reason=sign.reason,
        opened_at=turn.now.wall,
        round=doc.round,
        counted_until=turn.now.wall,
        ledger=Ledger(detect_s=max(sign.detect_s, 0.0)),
        node=sign.node,
        rank=sign.rank,
        fingerprint=sign.fingerprint,
        exit_code=sign.exit_code,
        is_of_code=sign.is_of_code,
        weight=sign.weight,
        trigger_fact=sign.fact,
        ranks=0 if sign.rank is None else 1,
    )
    turn.since("counted", incident.id, incident.counted_until)
    turn.since("extended", incident.id)
    turn.fact(
        IncidentOpened,
        incident=incident.id,
        trigger=sign.trigger,
        reason=sign.reason,
        trigger_fact=sign.fact,
        node=sign.node,
        rank=sign.rank,
        step=doc.round_step if sign.step is None else sign.step,
        phase="step" if doc.has_stepped else "start" if doc.phase == "forming" else "first_step",
    )
    return incident


def _join(turn: Turn, incident: OpenIncident, sign: Sign) -> OpenIncident:
    told = _told(incident, sign)
    if told.trigger_fact != incident.trigger_fact or told.node != incident.node:
        turn.memory.forget("extended", incident.id)
        turn.memory.since(turn.now.s - _SAY_EVERY_S, "extended", incident.id)
    return told


def _told(incident: OpenIncident, sign: Sign) -> OpenIncident:
    """One more report; it becomes the cause if it explains the others better."""
    facts = (*incident.unsaid, *([sign.fact] if sign.fact else []))[:_NAMED_MOST]
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
    if sign.weight <= incident.weight or incident.is_decided:
        return incident
    return replace(
        incident,
        trigger=sign.trigger,
        reason=sign.reason,
        node=sign.node,
        rank=sign.rank,
        fingerprint=sign.fingerprint,
        exit_code=sign.exit_code,
        is_of_code=sign.is_of_code,
        weight=sign.weight,
        trigger_fact=sign.fact,
    )


def _count(
    turn: Turn, incident: OpenIncident, entry: str, *, restore_s: float = 0.0
) -> OpenIncident:
    """The time since it was counted last goes into one entry, but for that of a restore."""
    left_s = _elapsed_s(turn, incident)
    restored_s = min(max(restore_s, 0.0), left_s)
    return _moved(turn, incident, {entry: left_s - restored_s, "restore_s": restored_s})


def _count_ending(turn: Turn, incident: OpenIncident) -> OpenIncident:
    """The time from a round's end until the next has formed: what agents say, and the rest.

    Agents collect evidence, then stop their ranks, beside each other; then the backoff runs.
    """
    left_s = _elapsed_s(turn, incident)
    entries: dict[str, float] = {}
    for entry, said_s in (
        ("evidence_s", incident.evidence_s),
        ("stop_s", incident.stop_s),
        ("decide_s", incident.delay_s),
    ):
        entries[entry] = min(max(said_s, 0.0), left_s)
        left_s -= entries[entry]
    entries["rendezvous_s"] = left_s
    moved = _moved(turn, incident, entries)
    return replace(moved, evidence_s=0.0, stop_s=0.0)


def _moved(turn: Turn, incident: OpenIncident, entries: dict[str, float]) -> OpenIncident:
    before: Ledger = incident.ledger
    ledger = replace(
        before, **{name: getattr(before, name) + seconds for name, seconds in entries.items()}
    )
    turn.memory.forget("counted", incident.id)
    moved = replace(incident, ledger=ledger, counted_until=turn.now.wall)
    turn.since("counted", incident.id, moved.counted_until)
    return moved


def _elapsed_s(turn: Turn, incident: OpenIncident) -> float:
    """By our own clock, if we saw the beginning; else by the wall clock of whoever did."""
    began = turn.memory.known("counted", incident.id, incident.counted_until)
    if began is not None:
        return turn.now.s - began
    return max((turn.now.wall - incident.counted_until).total_seconds(), 0.0)
