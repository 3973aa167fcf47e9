"""Replacement groups: nodes that are replaced as a unit, for example the nodes of a rack."""

from collections import defaultdict

from everstep.messages import Option, Seat
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import came_of, decide_to
from everstep_services.rendezvous.domain.formation import candidate_of, world_of
from everstep_services.rendezvous.domain.placement import largest_size
from everstep_services.rendezvous.domain.state import OVER

_NAMED_MOST = 100


def settle(batch: Batch) -> None:
    """Have the rest of a broken group leave, once other groups can form a round without it.

    A group is broken if it has lost a node that held a slot, and has too few nodes for the slots
    that it holds. Until others can take its place, its nodes wait for the group to be complete.
    """
    doc = batch.state.doc
    if doc.spec.slots_per_group <= 1 or doc.phase in OVER:
        return
    broken = _broken(batch)
    if not broken:
        return
    stay = [
        candidate_of(seat)
        for seat in batch.state.seats
        if seat.place not in broken and seat.stage != "gone" and not seat.is_leaving
    ]
    if not largest_size(stay, world_of(batch)):
        return
    for group, lost in broken.items():
        _send_away(batch, group, lost)


def _broken(batch: Batch) -> dict[str, Seat]:
    """Return a lost node of each broken group that has nodes left."""
    held: dict[str, int] = defaultdict(int)
    here: dict[str, int] = defaultdict(int)
    lost: dict[str, Seat] = {}
    for seat in batch.state.seats:
        held[seat.place] += seat.slot is not None
        if seat.stage == "gone" or seat.is_leaving:
            if seat.slot is not None:
                lost.setdefault(seat.place, seat)
        else:
            here[seat.place] += 1
    return {group: seat for group, seat in lost.items() if 0 < here[group] < held[group]}


def _send_away(batch: Batch, group: str, lost: Seat) -> None:
    rest = [
        seat
        for seat in batch.state.seats
        if seat.place == group and seat.stage != "gone" and not seat.is_leaving
    ]
    doc = batch.state.doc
    fate = "must leave" if lost.stage != "gone" else "is gone"
    why = f"{lost.node} {fate}: the other nodes of its replacement group {group} leave with it"
    for seat in rest:
        batch.state.send_away(seat, why)
    decide_to(
        batch,
        "exclude",
        why,
        rule="exclude.group",
        incident=doc.incident.id if doc.incident else None,
        considered=(Option(action="wait", rejected="other groups can form the next round"),),
        nodes_out=tuple(seat.node for seat in rest[:_NAMED_MOST]),
    )
    came_of(batch, "done", f"{len(rest)} nodes of {group} leave", "exclude")
