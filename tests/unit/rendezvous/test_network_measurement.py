"""Nodes measure the network when somebody asks, and no ranks are in the way."""

from typing import Any

import msgspec

from everstep.messages import Done, MeasureNetwork, OperatorActed, RequestMeasurement
from tests.unit.rendezvous.world import World, names, spec

TEST = "0193aefc11e25f0a8c7d4b6e9f201c3d"


def asked(world: World, **fields: Any) -> Done:
    question = RequestMeasurement(job="j", test=TEST, by="ann", reason="slow", **fields)
    (reply,) = world.apply(question).replies
    assert isinstance(reply, Done)
    return reply


def ordered(world: World) -> list[MeasureNetwork]:
    return [order for _, order in world.orders if isinstance(order, MeasureNetwork)]


def waiting(count: int) -> World:
    """Nodes of a job that needs one more."""
    world = World(spec(count + 1))
    world.join(*names(count))
    return world


def test_all_nodes_that_are_there_get_one_order_with_a_token_and_ports_of_their_own() -> None:
    world = waiting(5)
    done = asked(world, origin="cli")
    assert not done.is_refused
    assert done.text.startswith("5 nodes measure the network in pairs, in 5 turns of 4 s")
    ((to, order),) = [it for it in world.orders if isinstance(it[1], MeasureNetwork)]
    assert isinstance(order, MeasureNetwork)
    assert (to, order.id, order.reason) == (None, TEST, "ann: slow")
    assert [peer.node for peer in order.peers] == names(5)
    assert len({peer.port for peer in order.peers}) == 5
    assert all(20_000 <= peer.port < 32_000 for peer in order.peers)
    assert len(order.token) == 64
    assert order.token not in repr(order)
    (act,) = world.of(OperatorActed)
    assert (act.action, act.outcome, act.reason) == ("measure_network", "accepted", "slow")


def test_another_test_has_another_token() -> None:
    world = waiting(2)
    asked(world)
    asked(world)
    one, other = ordered(world)
    assert one.token != other.token


def test_there_are_as_many_turns_as_partners_are_wanted_and_never_more_than_pairs() -> None:
    for count, partners, turns in ((2, 8, 1), (3, 8, 3), (4, 8, 3), (12, 8, 8), (12, 2, 2)):
        world = waiting(count)
        asked(world, partners=partners)
        assert [order.turns for order in ordered(world)] == [turns], (count, partners)


def test_where_ranks_run_only_if_somebody_accepts_that() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join("n2", "n3")
    refused = asked(world)
    assert refused.is_refused
    assert refused.text.startswith("ranks run on n0, n1: ")
    assert "--beside-training" in refused.text
    assert not ordered(world)
    assert not asked(world, nodes=("n3", "n2")).is_refused
    assert not asked(world, is_beside_training=True).is_refused
    assert [len(order.peers) for order in ordered(world)] == [2, 4]
    assert [act.outcome for act in world.of(OperatorActed)] == ["refused", "accepted", "accepted"]


def test_it_takes_two_nodes_and_those_that_are_named_must_be_there() -> None:
    world = waiting(3)
    assert asked(world, nodes=("n1", "n9", "n8")).text == "n9, n8 takes no part in the job"
    assert asked(world, nodes=("n1", "n1")).text.startswith(
        "1 nodes would measure: name at least 2 nodes"
    )
    world.leave("n2")
    assert asked(world, nodes=("n1", "n2")).is_refused
    assert not ordered(world)


def test_the_largest_order_fits_into_one_message() -> None:
    world = waiting(4096)
    asked(world)
    (order,) = ordered(world)
    assert len(msgspec.json.encode(order)) < 500_000
    world.join("n9999")
    assert asked(world).is_refused
