"""Nodes without a place by people or the scheduler are placed by their NVLink domain."""

from typing import Any

import pytest

from everstep.messages import NodeJoined
from tests.unit.rendezvous.world import World, spec


def joined(world: World, domains: str, **fields: Any) -> list[str]:
    """One node for each letter, which names its domain; return the nodes by their slots."""
    asks = [
        world.ask(f"n{place}", nvlink_domain=f"nvlink-{letter}", **fields)
        for place, letter in enumerate(domains)
    ]
    world.apply(*asks)
    world.tick(60)
    members = {seat.slot: seat.node for seat in world.doc.seats if seat.slot is not None}
    return [members[slot] for slot in sorted(members)]


def test_a_segment_is_filled_from_one_nvlink_domain() -> None:
    world = World(spec(4, slots_per_segment=2))
    assert joined(world, "abab") == ["n0", "n2", "n1", "n3"]
    assert {fact.nvlink_domain for fact in world.of(NodeJoined)} == {"nvlink-a", "nvlink-b"}


def test_a_segment_that_no_domain_fills_forms_no_round() -> None:
    assert joined(World(spec(4, slots_per_segment=4)), "abab") == []


@pytest.mark.parametrize("place", [{"failure_domain": "rack-1"}, {"topology": ("spine", "leaf")}])
def test_what_people_or_the_scheduler_say_wins(place: dict[str, Any]) -> None:
    world = World(spec(4, slots_per_segment=4))
    assert joined(world, "abab", **place) == ["n0", "n1", "n2", "n3"]


def test_a_replacement_group_wins_over_the_domain() -> None:
    world = World(spec(2, slots_per_group=2))
    assert joined(world, "ab", group="rack-7") == ["n0", "n1"]
