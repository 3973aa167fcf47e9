"""Pairs that measure the network: each once, never two of a node at once, and who is slow."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.node_pairs import MeasuredPair, schedule, slow_ones


@given(st.integers(0, 33))
def test_every_pair_meets_once_in_the_fewest_turns(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    turns = list(schedule(nodes))
    for turn in turns:
        busy = [node for pair in turn for node in pair]
        assert len(busy) == len(set(busy))
    met = sorted(tuple(sorted(pair)) for turn in turns for pair in turn)
    assert met == sorted(tuple(sorted(pair)) for pair in combinations(nodes, 2))
    assert len(turns) == max(count - 1 + count % 2, 0) or count < 2


def figures(count: int, **slow: float) -> list[MeasuredPair]:
    """Everybody at about 1000, those that are named (`n1` or `n1_n2`) slower."""
    found = []
    for number, pair in enumerate(combinations([f"n{one}" for one in range(count)], 2)):
        named = [*pair, "_".join(pair)]
        speed = min(slow.get(name, 1000 + number % 7 * 20) for name in named)
        found.append(MeasuredPair(pair, speed))
    return found


@pytest.mark.parametrize(
    ("measured", "blamed"),
    [
        (figures(8), []),
        (figures(8, n3=100), [("n3",)]),
        (figures(8, n3=100, n5=0), [("n3",), ("n5",)]),
        (figures(8, n1_n6=200), [("n1", "n6")]),
        (figures(8, n3=100, n1_n6=200), [("n3",), ("n1", "n6")]),
        (figures(3, n2=100), [("n2",)]),
        (figures(4, n0=100), [("n0",)]),
        (figures(8, n3=600), []),
        (figures(8, n1_n2=100, n1_n3=100), [("n1", "n2"), ("n1", "n3")]),
        (figures(2, n1=1), []),  # with nobody to compare with
        ([], []),
        (figures(4, n0=0, n1=0, n2=0, n3=0), []),
        ([*figures(6), MeasuredPair(("n6", "n0"), 10.0)], [("n6", "n0")]),
    ],
)
def test_who_is_slow(measured: list[MeasuredPair], blamed: list[tuple[str, ...]]) -> None:
    assert [one.nodes for one in slow_ones(measured)] == blamed


def test_the_reason_has_the_numbers() -> None:
    (node,) = slow_ones([MeasuredPair(pair.pair, pair.mib_s) for pair in figures(5, n4=90)])
    assert node.reason.startswith("n4 reaches 90 MiB/s with every partner, and 1")
    (link,) = slow_ones(figures(5, n0_n1=100))
    assert link.reason.startswith("n0 reaches 100 MiB/s with n1 alone, and ")


@given(st.integers(3, 12), st.data())
def test_a_planted_slow_node_is_the_only_one_named(count: int, data: st.DataObject) -> None:
    slow = f"n{data.draw(st.integers(0, count - 1))}"
    measured = [
        MeasuredPair(pair, data.draw(st.floats(1, 100) if slow in pair else st.floats(900, 1100)))
        for pair in combinations([f"n{one}" for one in range(count)], 2)
    ]
    assert [one.nodes for one in slow_ones(measured)] == [(slow,)]
