"""Which nodes keep whose state: cliques, and what agents hear of them."""

from collections import Counter
from itertools import combinations

import pytest

from everstep.messages import RoundDocument, StartRanks
from everstep_services.rendezvous.domain.events import JobControl
from everstep_services.rendezvous.domain.replica_placement import Cliques, ReplicaSlot, cliques
from everstep_services.rendezvous.service import _shown
from tests.unit.rendezvous.world import World, spec


def places(count: int, domain: int = 0) -> list[ReplicaSlot]:
    """Slots in order, with this number of them in each failure domain."""
    return [ReplicaSlot(slot, f"rack-{slot // domain}" if domain else "") for slot in range(count)]


def groups(of: dict[int, int]) -> set[tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for slot, clique in of.items():
        found.setdefault(clique, []).append(slot)
    return {tuple(sorted(each)) for each in found.values()}


def survivors(of: dict[int, int], factor: int, needed: int, lost: int) -> float:
    """The part of all losses of this number of nodes that leave every state somewhere."""
    near = Cliques(of)
    kept = {slot: near.after(slot)[: factor - 1] for slot in of}
    ways = list(combinations(of, lost))
    good = [all(len(set(kept[slot]).difference(gone)) >= needed for slot in gone) for gone in ways]
    return sum(good) / len(ways)


def test_with_a_jump_the_cliques_are_those_of_nvrx() -> None:
    found = groups(cliques(places(32), 2, 8, {}))
    assert found == {(n, n + 8) for n in (*range(8), *range(16, 24))}


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("count", [2, 3, 5, 8, 13, 64])
def test_every_slot_has_as_many_keepers_and_each_keeps_as_many(factor: int, count: int) -> None:
    of = cliques(places(count), factor, None, {})
    factor = min(factor, count)
    near = Cliques(of)
    kept = Counter(keeper for slot in of for keeper in near.after(slot)[: factor - 1])
    assert sorted(of) == list(range(count))
    assert set(kept.values()) == {factor - 1}
    assert all(slot not in near.after(slot) for slot in of)


@pytest.mark.parametrize(("count", "domain"), [(8, 2), (8, 4), (9, 3), (16, 5), (100, 20)])
def test_a_state_is_kept_in_another_failure_domain_where_that_can_be(
    count: int, domain: int
) -> None:
    """No keeper shares its owner's domain (A9.1)."""
    near = Cliques(cliques(places(count, domain), 2, None, {}))
    assert all(near.after(slot)[0] // domain != slot // domain for slot in range(count))


def test_domains_without_order_are_told_apart_too() -> None:
    mixed = [ReplicaSlot(slot, "abcd"[slot * 7 % 4]) for slot in range(16)]
    near = Cliques(cliques(mixed, 4, None, {}))
    for place in mixed:
        others = {mixed[slot].domain for slot in near.after(place.slot)}
        assert others == set("abcd") - {place.domain}


def test_cliques_stay_unless_others_mix_fewer_domains() -> None:
    before = cliques(places(8, 2), 2, None, {})
    elsewhere = [
        ReplicaSlot(slot, "rack-9" if slot == 3 else f"rack-{slot // 2}") for slot in range(8)
    ]
    assert cliques(elsewhere, 2, None, before) == before
    partner = Cliques(before).after(3)[0]
    together = [
        ReplicaSlot(slot, f"rack-{partner // 2}" if slot == 3 else f"rack-{slot // 2}")
        for slot in range(8)
    ]
    after = cliques(together, 2, None, before)
    assert after != before
    assert groups(after).isdisjoint({tuple(sorted((3, partner)))})


def test_one_node_keeps_nothing_for_others() -> None:
    assert cliques(places(1), 2, None, {}) == {}


def test_mirrors_survive_all_pairs_but_partners_and_parts_survive_all() -> None:
    """Every set of lost nodes is counted (A9.1)."""
    pairs = cliques(places(16), 2, None, {})
    assert survivors(pairs, 2, 1, 1) == 1.0
    assert survivors(pairs, 2, 1, 2) == 1 - 8 / 120
    parts = cliques(places(16), 7, None, {})
    assert [survivors(parts, 7, 4, lost) for lost in (1, 2, 3)] == [1.0, 1.0, 1.0]
    assert survivors(parts, 7, 4, 4) < 1.0


# -- what agents hear ----------------------------------------------------------------------------


def formed(world: World, *nodes: str) -> dict[str, StartRanks]:
    for number, node in enumerate(nodes):
        world.join(node, replica_port=7000 + number, failure_domain=f"rack-{number // 2}")
    return {node: world.order(node) for node in world.members()}


def test_each_member_is_told_whom_to_send_its_state_and_who_may_have_it() -> None:
    world = World(spec(4))
    orders = formed(world, "a", "b", "c", "d")
    assert [peer.node for peer in orders["a"].replica_peers] == ["c"]
    assert [peer.node for peer in orders["c"].replica_peers] == ["a"]
    assert orders["a"].replica_peers[0].port == 7002
    keys = {order.replica_key for order in orders.values()}
    assert len(keys) == 1
    assert len(keys.pop()) == 64


def back(world: World, **last_slots: int) -> None:
    for number, node in enumerate("abcde"):
        if node in last_slots:
            world.back(node, replica_port=7000 + number, last_slot=last_slots[node])


def test_who_takes_a_slot_over_is_told_its_keepers() -> None:
    world = World(spec(4, spares=1))
    before = formed(world, "a", "b", "c", "d", "e")["a"]
    world.run()
    world.leave("a")
    back(world, b=1, c=2, d=3)
    world.tick(10)
    order = world.order("e")
    assert (order.slot, order.round, order.replica_key) == (before.slot, 2, before.replica_key)
    assert [peer.node for peer in order.replica_sources] == ["c"]
    assert [peer.node for peer in world.order("c").replica_peers] == ["e"]


def test_and_its_former_holder_when_that_is_a_spare_now() -> None:
    world = World(spec(4, spares=1))
    formed(world, "a", "b", "c", "d", "e")
    world.run()
    world.control = JobControl(suspects={"a": "two strikes"})
    world.report("b", "rank_exited", rank=2, exit_code=1)
    back(world, a=0, b=1, c=2, d=3)
    world.tick(10)
    order = world.order("e")
    assert (order.slot, order.round) == (0, 2)
    assert [peer.node for peer in order.replica_sources] == ["a", "c"]


def test_a_lone_node_and_nodes_that_hold_nothing_are_told_of_nobody() -> None:
    world = World(spec(1))
    assert formed(world, "a")["a"].replica_peers == ()
    world = World(spec(2))
    world.join("a", "b")
    assert world.order("a").replica_peers == ()


def test_with_too_few_nodes_for_parts_there_are_mirrors() -> None:
    settings = {"replica_factor": 7, "replica_parts_needed": 4}
    world = World(spec(4), **settings)
    order = formed(world, "a", "b", "c", "d")["a"]
    assert (order.replica_parts_needed, len(order.replica_peers)) == (1, 1)
    world = World(spec(7), **settings)
    order = formed(world, *"abcdefg")["a"]
    assert (order.replica_parts_needed, len(order.replica_peers)) == (4, 6)


def test_the_key_is_not_shown_to_those_who_ask_for_the_document() -> None:
    world = World(spec(2))
    key = formed(world, "a", "b")["a"].replica_key
    shown = _shown(world.doc)
    assert isinstance(shown, RoundDocument)
    assert shown.replication is not None
    assert (shown.replication.key, shown.replication.factor) == ("", 2)
    assert key not in f"{world.doc.replication!r} {world.order('a')!r}"
