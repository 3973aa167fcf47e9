"""Which nodes measure the network with each other, when, and in how many turns."""

from everstep.messages import MeasureNetwork, NetworkPeer, RequestMeasurement, Seat
from everstep_services.rendezvous.domain.batch import Turn

_TURN_S = 4.0
"""One measurement sends for a second; the rest is for who is late, and for slow links."""
_FIRST_PORT, _PORTS = 20_000, 12_000
_NODES_MOST = 4096
"""All of them must fit into one order."""
_NAMED_MOST = 20


def order_for(turn: Turn, ask: RequestMeasurement) -> MeasureNetwork | str:
    """What all agents are told, or why nothing is measured."""
    doc = turn.state.doc
    here = {seat.node: seat for seat in turn.state.seats if seat.stage != "gone"}
    missing = [node for node in ask.nodes if node not in here]
    if missing:
        return f"{_named(missing)} takes no part in the job"
    seats = [here[node] for node in sorted(set(ask.nodes) or here)]
    if not 2 <= len(seats) <= _NODES_MOST:
        return f"{len(seats)} nodes would measure: it takes 2, and {_NODES_MOST} at most; name some"
    busy = [seat.node for seat in seats if seat.stage != "idle"]
    if busy and not ask.is_beside_training:
        return (
            f"ranks run on {_named(busy)}: they and the figures would spoil each other. Name "
            f"nodes that have none, or accept that with --beside-training"
        )
    return MeasureNetwork(
        id=ask.test,
        job=doc.job,
        round=doc.round,
        reason=f"{ask.by}: {ask.reason}",
        peers=_peers(seats, ask.test),
        token=turn.now.new_id() + turn.now.new_id(),
        turns=max(1, min(ask.partners, len(seats) - 1 + len(seats) % 2)),
        turn_s=_TURN_S,
    )


def told(order: MeasureNetwork) -> str:
    """What happens now, for the person who asked."""
    turns = "1 turn" if order.turns == 1 else f"{order.turns} turns"
    return (
        f"{len(order.peers)} nodes measure the network in pairs, in {turns} of "
        f"{order.turn_s:g} s; the figures come as facts"
    )


def _peers(seats: list[Seat], test: str) -> tuple[NetworkPeer, ...]:
    """Each with a port of its own: several may be on one host."""
    first = _FIRST_PORT + int(test[-8:], 16) % (_PORTS - len(seats))
    return tuple(
        NetworkPeer(node=seat.node, address=seat.address, port=first + number)
        for number, seat in enumerate(seats)
    )


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _NAMED_MOST} more" if len(nodes) > _NAMED_MOST else ""
    return ", ".join(nodes[:_NAMED_MOST]) + more
