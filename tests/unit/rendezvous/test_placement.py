"""Who gets which slot."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_services.rendezvous.domain.placement import (
    Candidate,
    World,
    assign,
    assign_elsewhere,
    largest_size,
    obstacle,
)


def nodes(*ranks: int, network: str = "") -> list[Candidate]:
    return [Candidate(f"n{rank}", infra_rank=rank, network=network) for rank in ranks]


def in_order(placed: dict[int, str]) -> list[str]:
    return [placed[slot] for slot in range(len(placed))]


def test_the_first_round_is_in_the_schedulers_order_and_gaps_do_not_matter() -> None:
    placed = assign(nodes(7, 3, 0, 6, 1), 3, 1, {})
    assert in_order(placed) == ["n0", "n1", "n3"]


def test_without_infra_ranks_names_are_ordered_as_people_count() -> None:
    placed = assign([Candidate(name) for name in ("gpu-10", "gpu-9", "gpu-1")], 3, 1, {})
    assert in_order(placed) == ["gpu-1", "gpu-9", "gpu-10"]


def test_neighbours_in_a_failure_domain_are_neighbours_in_slots() -> None:
    found = [Candidate(f"n{n}", failure_domain=f"rack{n % 2}") for n in range(4)]
    assert in_order(assign(found, 4, 1, {})) == ["n0", "n2", "n1", "n3"]


def test_a_spare_of_the_lost_nodes_failure_domain_is_preferred() -> None:
    here = [
        Candidate("a", slot=0, failure_domain="r1"),
        Candidate("near", failure_domain="r2"),
        Candidate("far", infra_rank=0, failure_domain="r1"),
    ]
    assert in_order(assign(here, 2, 1, {1: "r2"})) == ["a", "near"]
    assert in_order(assign(here, 2, 1, {1: "r9"})) == ["a", "far"]


def test_a_shrinking_world_moves_only_those_beyond_its_end() -> None:
    here = [Candidate("a", slot=0), Candidate("c", slot=2), Candidate("d", slot=3)]
    assert in_order(assign(here, 3, 1, {})) == ["a", "d", "c"]


@pytest.mark.parametrize(
    ("domains", "size", "placed"),
    [
        ({"d0": range(8), "d1": range(8, 12)}, 8, [f"n{n}" for n in range(8)]),
        ({"d0": range(12)}, 4, ["n0", "n1", "n2", "n3"]),
        (
            {"d0": range(6), "d1": range(6, 10), "d2": range(10, 13)},
            8,
            ["n0", "n1", "n2", "n3", "n6", "n7", "n8", "n9"],
        ),
    ],
)
def test_segments_of_four(domains: dict[str, range], size: int, placed: list[str]) -> None:
    here = [
        Candidate(f"n{n}", infra_rank=n, network=network)
        for network, numbers in domains.items()
        for n in numbers
    ]
    assert in_order(assign(list(reversed(here)), size, 4, {})) == placed


def test_a_suspect_gets_a_slot_only_where_there_is_nobody_else() -> None:
    """Spares come before suspects (A10.6)."""
    first, bad = Candidate("a", infra_rank=0, is_suspect=True), Candidate("b", is_suspect=True)
    assert in_order(assign([first, Candidate("c"), Candidate("d")], 2, 1, {})) == ["c", "d"]
    assert in_order(assign([first, bad, Candidate("c")], 2, 1, {})) == ["a", "c"]
    assert in_order(assign([first, bad], 2, 1, {})) == ["a", "b"]


def test_a_suspect_holder_makes_way_for_a_spare_and_nobody_else_moves() -> None:
    here = [
        Candidate("a", slot=0),
        Candidate("b", slot=1, is_suspect=True),
        Candidate("c", slot=2),
        Candidate("d", infra_rank=0),
        Candidate("e", failure_domain="r2"),
    ]
    assert in_order(assign(here, 3, 1, {1: "r2"})) == ["a", "e", "c"]


def test_a_suspect_holder_keeps_its_slot_when_the_only_spare_is_suspect_too() -> None:
    here = [Candidate("a", slot=0, is_suspect=True), Candidate("b", slot=1)]
    spare = Candidate("c", infra_rank=0, is_suspect=True)
    assert in_order(assign([*here, spare], 2, 1, {})) == ["a", "b"]


def test_a_shrinking_world_leaves_out_suspects_first() -> None:
    here = [Candidate("a", slot=0, is_suspect=True), Candidate("b", slot=1), Candidate("c", slot=2)]
    assert in_order(assign(here, 2, 1, {})) == ["c", "b"]


def test_a_suspect_in_a_segment_makes_way_only_where_a_whole_segment_is_left() -> None:
    pair = [Candidate("a0", slot=0, network="a", is_suspect=True), Candidate("a1", network="a")]
    other = [Candidate("b0", network="b"), Candidate("b1", network="b")]
    assert in_order(assign([*pair, *other[:1]], 2, 2, {})) == ["a0", "a1"]
    assert in_order(assign([*pair, Candidate("a2", network="a")], 2, 2, {})) == ["a1", "a2"]
    assert in_order(assign([*pair, *other], 2, 2, {})) == ["b0", "b1"]


def test_too_few_whole_segments_cannot_be_placed_and_why_is_said() -> None:
    here = nodes(0, 1, 2, network="a") + nodes(3, 4, 5, network="b")
    world = World(4, 4, segment=4)
    assert largest_size(here, world) == 0
    assert "each segment of 4 slots" in obstacle(here, world)


def test_a_hole_in_a_segment_is_filled_from_its_own_domain() -> None:
    here = [
        Candidate("a0", slot=0, network="a"),
        Candidate("b0", slot=2, network="b"),
        Candidate("b1", slot=3, network="b"),
        Candidate("a9", network="a"),
        Candidate("b9", infra_rank=0, network="b"),
    ]
    assert in_order(assign(here, 4, 2, {})) == ["a0", "a9", "b0", "b1"]


def test_a_segment_that_cannot_be_filled_moves_as_a_whole_and_others_stay() -> None:
    here = [
        Candidate("a0", slot=0, network="a"),
        Candidate("b0", slot=2, network="b"),
        Candidate("b1", slot=3, network="b"),
        Candidate("c0", network="c"),
        Candidate("c1", network="c"),
    ]
    assert in_order(assign(here, 4, 2, {})) == ["c0", "c1", "b0", "b1"]


def test_a_world_grows_by_units_that_are_whole_segments_too() -> None:
    world = World(2, 12, unit=2, segment=3)
    assert list(world.sizes()) == [12, 6]


def test_nodes_that_do_not_say_where_they_are_share_no_segment() -> None:
    assert largest_size([Candidate("a"), Candidate("b")], World(2, 2, segment=2)) == 0


@pytest.mark.parametrize(
    ("holders", "spares", "last", "placed"),
    [
        ("ab", "", "a", "ba"),
        ("ab", "c", "a", "bc"),
        ("ab", "c", "b", "ca"),
        ("abc", "d", "b", "cda"),
        ("abc", "de", "c", "dea"),
        ("ab", "cde", "a", "cd"),
        ("a", "b", "a", "b"),
        ("a", "", "a", "a"),
    ],
)
def test_ranks_that_ask_for_other_nodes_get_spares_first(
    holders: str, spares: str, last: str, placed: str
) -> None:
    here = [Candidate(node, slot=slot) for slot, node in enumerate(holders)]
    here += [Candidate(node) for node in spares]
    assert "".join(in_order(assign_elsewhere(here, len(holders), 1, last))) == placed


@given(st.integers(2, 9), st.integers(0, 4), st.integers(1, 3), st.integers(0, 8), st.randoms())
def test_no_rank_that_asks_for_another_node_keeps_its_own(
    slots: int, spares: int, gone: int, last: int, rng: Random
) -> None:
    here = [Candidate(f"n{slot}", slot=slot) for slot in range(slots)]
    here += [Candidate(f"s{number}") for number in range(spares)]
    here = rng.sample(here, max(len(here) - gone, 2))
    size = min(slots, len(here))
    placed = in_order(assign_elsewhere(here, size, 1, f"n{last}"))
    assert all(placed[slot] != f"n{slot}" for slot in range(size))
    assert len(set(placed)) == size


def test_nodes_of_a_segment_that_ask_for_other_nodes_take_each_others_place() -> None:
    names = ["a0", "a1", "b0", "b1"]
    here = [Candidate(node, slot=slot, network=node[0]) for slot, node in enumerate(names)]
    assert in_order(assign_elsewhere(here, 4, 2, "a0")) == ["a1", "a0", "b1", "b0"]
    assert in_order(assign_elsewhere(here[:2], 2, 2, "a0")) == ["a1", "a0"]
