"""The network test for which a round may wait: when it is due, its order, what nodes tell."""

from collections.abc import Sequence

from msgspec.structs import replace

from everstep.messages import Join, MeasureNetwork, NetworkPeer, Seat
from everstep.messages.documents.rounds import OpenNetworkTest
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.placement import (
    FIRST_PORT,
    PORTS,
    Candidate,
    World,
    largest_size,
)

_TURNS = 2
"""With two partners a slow node differs from a slow link; an odd node rests for a turn."""
_NODES_MOST = 2048
"""Their figures must fit into the document."""


def told(batch: Batch, ask: Join) -> None:
    """Note the figures that an agent brings, once."""
    test, figures = batch.state.doc.network, ask.network
    if test is None or test.is_over or figures is None or figures.test != test.order.id:
        return
    if any(figures.node == ask.node for figures in test.figures):
        return
    figures = replace(figures, node=ask.node, links=figures.links[: test.order.turns])
    batch.state.set(network=replace(test, figures=(*test.figures, figures)))


def open_test(batch: Batch) -> OpenNetworkTest | None:
    """Return the test of the round that forms next, over or not."""
    test = batch.state.doc.network
    return None if test is None or test.round != batch.state.doc.round + 1 else test


def doubted(batch: Batch) -> frozenset[str]:
    """Return the nodes that the test speaks against, and those that came too late for it."""
    test = open_test(batch)
    if test is None or not test.is_over or not batch.control.enforces("replace", otherwise=True):
        return frozenset()
    measured = {peer.node for peer in test.order.peers}
    late = (seat.node for seat in batch.state.in_stage("idle") if seat.node not in measured)
    return frozenset((*test.doubted, *late))


def begins(batch: Batch, candidates: Sequence[Candidate], world: World) -> bool:
    """Begin the test if it is due; the round then waits for it."""
    if not _is_due(batch, candidates, world):
        return False
    number = batch.state.doc.round + 1
    if not 2 <= len(candidates) <= _NODES_MOST:
        why = f"{len(candidates)} nodes are here, and at most {_NODES_MOST} can be measured"
        if len(candidates) == 1:
            why = "with one node there is nothing to test"
        batch.say_waiting("network.none", f"makes no network test before round {number}: {why}")
        return False
    if batch.state.doc.phase == "ending":
        batch.enter("joining", batch.state.doc.reason)
    test = OpenNetworkTest(
        order=_order(batch, {candidate.node for candidate in candidates}), round=number
    )
    batch.state.set(network=test)
    batch.say_waiting(
        f"network.test {test.order.id}",
        f"tests the network before round {number}: {len(candidates)} nodes, each with up to "
        f"{min(test.order.turns, len(candidates) - 1)} others, for at most "
        f"{batch.settings.network_test_within_s:g} s",
    )
    send(batch, test)
    return True


def send(batch: Batch, test: OpenNetworkTest) -> None:
    """Send the order, once by each replica that sees the test: agents obey the first."""
    if not batch.timers.is_running("network_test", test.order.id):
        batch.timers.start("network_test", test.order.id)
        batch.send(test.order)
    elapsed_s = batch.timers.elapsed("network_test", test.order.id)
    batch.wake_in(batch.settings.network_test_within_s - elapsed_s)


def _is_due(batch: Batch, candidates: Sequence[Candidate], world: World) -> bool:
    doc, test = batch.state.doc, open_test(batch)
    if test is not None:  # again only where measured nodes are too few
        measured = {peer.node for peer in test.order.peers}
        return (
            largest_size(
                [candidate for candidate in candidates if candidate.node in measured], world
            )
            == 0
        )
    has_failed = doc.incident is not None and not doc.incident.is_of_code
    is_first = doc.spec.network_test in {"first", "failures"} and not batch.state.members
    return is_first or (doc.spec.network_test == "failures" and has_failed)


def _order(batch: Batch, nodes: set[str]) -> MeasureNetwork:
    doc, test = batch.state.doc, batch.now.new_id()
    seats = sorted((seat for seat in batch.state.seats if seat.node in nodes), key=_name)
    turns = min(_TURNS + len(seats) % 2, len(seats) - 1 + len(seats) % 2)
    turn_s = batch.settings.network_test_within_s / (turns + 3)
    return MeasureNetwork(
        id=test,
        job=doc.job,
        round=doc.round,
        reason=f"before round {doc.round + 1}",
        peers=peers(seats, test, ports_each=max(doc.spec.ranks_per_node, 1)),
        token=batch.now.new_id() + batch.now.new_id(),
        turns=turns,
        turn_s=turn_s,
        has_sums=True,
        lead_s=2 * turn_s,
    )


def _name(seat: Seat) -> str:
    return seat.node


def peers(seats: Sequence[Seat], test: str, *, ports_each: int = 1) -> tuple[NetworkPeer, ...]:
    """Return the peers, each with ports of its own, because several may be on one host."""
    room = max(PORTS // ports_each, 1)
    first = int(test[-8:], 16) % room
    return tuple(
        NetworkPeer(
            node=seat.node,
            address=seat.address,
            port=FIRST_PORT + (first + number) % room * ports_each,
        )
        for number, seat in enumerate(seats)
    )
