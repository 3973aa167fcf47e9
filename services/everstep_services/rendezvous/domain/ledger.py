"""Where an incident's time goes: every second since the last progress, in exactly one entry."""

from msgspec.structs import replace

from everstep.messages import Ledger
from everstep.messages.documents import OpenIncident
from everstep_services.rendezvous.domain.batch import Turn


def count(
    turn: Turn, incident: OpenIncident, entry: str, *, restore_s: float = 0.0
) -> OpenIncident:
    """The time since it was counted last goes into one entry, but for that of a restore."""
    left_s = _elapsed_s(turn, incident)
    restored_s = min(max(restore_s, 0.0), left_s)
    return _moved(turn, incident, {entry: left_s - restored_s, "restore_s": restored_s})


def count_ending(turn: Turn, incident: OpenIncident) -> OpenIncident:
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
