"""The findings of a network test about nodes and links, and the nodes that it spares."""

from itertools import combinations
from typing import Any

import pytest

from everstep_services.cli.commands.nodes.network import judged, page
from everstep_services.cli.errors import Exit


def told(count: int, **speeds: float) -> dict[str, dict[str, Any]]:
    """Every pair measured at 1000, but for those that are named, as `n1_n2` or `n1`."""
    nodes = [f"n{number}" for number in range(count)]
    found: dict[str, dict[str, Any]] = {
        node: {"node": node, "nodes": nodes, "links": []} for node in nodes
    }
    for one, other in combinations(nodes, 2):
        speed = min(speeds.get(name, 1000.0) for name in (one, other, f"{one}_{other}"))
        found[one]["links"].append({"node": other, "mib_s": speed, "round_trip_s": 0.0001})
    return found


def test_a_slow_node_and_a_slow_link_are_named() -> None:
    found = judged(told(6, n3=90.0, n0_n1=200.0))
    assert [one.nodes for one in found.slow] == [("n3",), ("n0", "n1")]
    assert (found.untold, found.code) == ({}, Exit.ERROR)
    lines = list(page(found))
    assert lines[-2] == "slow: n3 reaches 90 MiB/s with every partner, and 1000 MiB/s is usual here"
    assert lines[-1].startswith("slow: n0 reaches 200 MiB/s with n1 alone")


def test_when_nobody_is_slow_that_is_said() -> None:
    found = judged(told(3))
    assert found.code is Exit.OK
    assert list(page(found)) == [
        "MiB/s",
        "      n0    n1    n2",
        "  n0        1000  1000",
        "  n1  1000        1000",
        "  n2  1000  1000",
        "nobody is slow: 3 pairs, 1000 MiB/s in the median",
    ]


@pytest.mark.parametrize("silent", [True, False])
def test_nothing_is_said_against_a_node_that_could_not_take_part(*, silent: bool) -> None:
    bodies = told(5, n4=0.0)
    if silent:
        del bodies["n4"]
        why = "its agent did not answer in time"
    else:
        bodies["n4"]["reason"] = why = "0.0.0.0:20007 cannot be listened on: Address in use"
    found = judged(bodies)
    assert found.slow == []
    assert found.untold == {"n4": why}
    assert found.code is Exit.TIMED_OUT
    assert f"unknown: n4: {why}" in list(page(found))


def test_a_node_that_took_part_and_is_reached_by_nobody_is_the_slow_one() -> None:
    found = judged(told(5, n4=0.0))
    assert [one.nodes for one in found.slow] == [("n4",)]
    assert not found.unreached, "each pair is of that node"


def test_two_nodes_that_do_not_reach_each_other_are_no_good_news() -> None:
    """There is nothing to compare them with."""
    bodies = told(2, n0_n1=0.0)
    bodies["n0"]["links"][0]["reason"] = why = "127.0.0.1:20007: no process listens there"
    found = judged(bodies)
    assert (found.slow, found.untold, found.code) == ([], {}, Exit.ERROR)
    assert list(page(found))[-1] == f"not reached: n0 and n1: {why}"


def test_of_many_pairs_that_do_not_reach_each_other_some_are_named_and_all_counted() -> None:
    bodies = told(20, **{f"n{number}": 0.0 for number in range(20)})
    lines = list(page(judged(bodies)))
    assert len(lines) == 17
    assert lines[-1] == "not reached: 174 more pairs, see -o json"


def test_many_nodes_are_no_table() -> None:
    assert list(page(judged(told(20)))) == ["nobody is slow: 190 pairs, 1000 MiB/s in the median"]


def test_no_figures_at_all_are_no_good_news() -> None:
    alone = {"n0": {"node": "n0", "nodes": ["n0", "n1"]}}
    found = judged(alone)
    assert (found.slow, found.code) == ([], Exit.TIMED_OUT)
