"""A round waits for a network test: who leaves by it, who is doubted, and that it never hangs."""

from typing import Any

import pytest

from everstep.messages import (
    ActionDecided,
    AwaitRound,
    JobEnded,
    LeaveJob,
    MeasureNetwork,
    NetworkFigures,
    NetworkLink,
    RoundFormed,
    StopJob,
)
from everstep.node_pairs import schedule
from everstep_services.rendezvous.domain.events import JobControl
from tests.unit.rendezvous.world import World, names, spec

WITHIN_S = 90.0


def held(nodes: int = 2, here: int = 3, **fields: Any) -> World:
    """A job whose nodes measure the network before the first round."""
    world = World(spec(nodes, **({"network_test": "first", "spares": here - nodes} | fields)))
    world.join(*names(here))
    return world


def ordered(world: World) -> list[MeasureNetwork]:
    return [order for _, order in world.orders if isinstance(order, MeasureNetwork)]


def said(world: World) -> list[str]:
    lines = [order.reason for _, order in world.orders if isinstance(order, AwaitRound)]
    return list(dict.fromkeys(lines))


def told(world: World, *silent: str, unfit: str = "", **slow: float) -> None:
    """All agents but the silent ones bring their figures; slow nodes and pairs have a speed."""
    order = ordered(world)[-1]
    nodes = [peer.node for peer in order.peers]
    links: dict[str, list[NetworkLink]] = {node: [] for node in nodes}
    for _, turn in zip(range(order.turns), schedule(nodes), strict=False):
        for caller, called in turn:
            of_pair = slow.get(f"{caller}_{called}", slow.get(f"{called}_{caller}", 1000.0))
            speed = min(of_pair, slow.get(caller, 1000.0), slow.get(called, 1000.0))
            if called in {*silent, unfit}:
                speed = 0.0
            why = "" if speed else "connection refused"
            link = NetworkLink(
                node=called, mib_s=500.0, sums_mib_s=speed, backend="nccl", reason=why
            )
            links[caller].append(link)
    for node in nodes:
        if node not in silent:
            figures = NetworkFigures(
                test=order.id,
                node=node,
                fact=f"fact of {node}",
                links=tuple(links[node]),
                reason="its port is taken" if node == unfit else "",
            )
            world.join(node, network=figures)


def test_the_first_round_waits_for_the_figures_and_says_what_it_does() -> None:
    world = held()
    (order,) = ordered(world)
    assert [peer.node for peer in order.peers] == ["n0", "n1", "n2"]
    assert len({port for peer in order.peers for port in (peer.port, peer.port + 1)}) == 6
    assert (order.turns, order.has_sums) == (3, True)
    assert order.lead_s + order.turns * order.turn_s < WITHIN_S
    assert (world.doc.phase, world.doc.round) == ("joining", 0)
    world.now += 4.0
    told(world)
    assert (world.doc.phase, world.doc.round, world.doc.network) == ("forming", 1, None)
    assert said(world) == [
        "tests the network before round 1: 3 nodes, each with up to 2 others, for at most 90 s",
        "has tested the network before round 1 in 4.0 s: 3 nodes have answered, 1000 to 1000 MiB/s "
        "over nccl",
    ]
    assert not world.of(ActionDecided)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 9])
def test_each_node_has_two_partners_where_there_are_as_many(nodes: int) -> None:
    world = held(nodes, nodes)
    (order,) = ordered(world)
    partners = dict.fromkeys(names(nodes), 0)
    for _, turn in zip(range(order.turns), schedule(names(nodes)), strict=False):
        for node in (node for pair in turn for node in pair):
            partners[node] += 1
    assert min(partners.values()) == min(2, nodes - 1)


def test_a_job_that_wants_none_and_a_job_of_one_node_go_on() -> None:
    world = held(network_test="off")
    assert (world.doc.phase, ordered(world), said(world)) == ("forming", [], [])
    alone = held(1, 1)
    assert (alone.doc.phase, ordered(alone)) == ("forming", [])
    assert said(alone) == [
        "makes no network test before round 1: with one node there is nothing to test"
    ]


def test_spares_that_come_within_the_last_call_are_measured_too() -> None:
    world = World(spec(2, network_test="first", spares=2))
    world.join("n0", "n1")
    assert not ordered(world)
    world.tick(0.5)
    world.join("n2")
    world.tick(0.5)
    (order,) = ordered(world)
    assert len(order.peers) == 3


def test_a_node_that_reaches_nobody_leaves_and_a_spare_has_its_slot() -> None:
    world = held()
    told(world, n0=0.0)
    (decision,) = world.of(ActionDecided)
    assert (decision.action, decision.rule, decision.nodes_out) == (
        "exclude",
        "network.slow",
        ("n0",),
    )
    assert set(decision.evidence) <= {"fact of n0", "fact of n1", "fact of n2"}
    assert decision.evidence
    assert world.members() == ["n1", "n2"]
    ((to, leave),) = [each for each in world.orders if isinstance(each[1], LeaveJob)]
    assert isinstance(leave, LeaveJob)
    why = "n0 reaches 0 MiB/s with every partner, and 1000 MiB/s is usual here (connection refused)"
    assert (to, leave.exit_code, leave.reason) == (
        "n0",
        0,
        f"{why}; the others continue without it",
    )
    assert decision.reason == why
    assert said(world)[-1].endswith(f"; {why}: it leaves the job")


def test_an_elastic_job_goes_on_with_fewer_nodes() -> None:
    world = World(spec(4, nodes_min=2, network_test="first"))
    world.join(*names(4))
    told(world, n3=100.0)
    world.tick(world.settings.elastic_wait_s)
    assert world.members() == ["n0", "n1", "n2"]


def test_a_slow_node_whose_slot_nobody_else_can_have_stays_and_that_is_on_record() -> None:
    world = held(3, 3)
    told(world, n1=100.0)
    (decision,) = world.of(ActionDecided)
    assert (decision.rule, decision.mode) == ("network.no_place", "observe")
    assert world.members() == ["n0", "n1", "n2"]
    assert "n1 reaches 100 MiB/s with every partner" in said(world)[-1]


def test_exclusions_that_only_observe_keep_the_node() -> None:
    world = World(spec(2, network_test="first", spares=1))
    world.control = JobControl(modes={"exclude": "observe"})
    world.join(*names(3))
    told(world, n0=0.0)
    (decision,) = world.of(ActionDecided)
    assert (decision.rule, decision.mode) == ("exclude.observe", "observe")
    assert world.members() == ["n1", "n2"]  # but a spare comes first
    assert not any(seat.is_leaving for seat in world.doc.seats)


def test_both_ends_of_a_slow_link_give_way_to_spares_and_nobody_leaves() -> None:
    world = held(2, 4)
    told(world, n0_n3=100.0)
    assert world.members() == ["n1", "n2"]
    assert not world.of(ActionDecided)
    assert "n0 reaches 100 MiB/s with n3 alone" in said(world)[-1]


@pytest.mark.parametrize("speed", [0.0, 100.0])
def test_what_all_nodes_share_accuses_none(speed: float) -> None:
    world = held()
    told(world, n0=speed, n1=speed, n2=speed)
    assert world.members() == ["n0", "n1"]
    assert not world.of(ActionDecided)
    whole = "100 to 100 MiB/s over nccl" if speed else "no pair could be measured"
    assert whole in said(world)[-1]


def test_two_nodes_that_do_not_reach_each_other_are_told_apart_by_nobody() -> None:
    world = held(2, 2)
    told(world, n0=0.0)
    assert world.members() == ["n0", "n1"]
    assert said(world)[-1].endswith("and no pair could be measured: connection refused")


def test_a_silent_node_holds_the_round_no_longer_than_the_limit_and_comes_last() -> None:
    world = held()
    world.tick(1.0)
    told(world, "n0")
    world.tick(WITHIN_S - 2.0)
    assert world.doc.phase == "joining"
    world.tick(1.0)
    assert world.members() == ["n1", "n2"]
    assert not world.of(ActionDecided)
    assert said(world)[-1].endswith(
        "; n0 could not be measured, and gets a slot only if no other node can"
    )


def test_nobody_answers_and_the_round_forms_in_time() -> None:
    world = held(2, 2)
    world.tick(WITHIN_S)
    assert world.members() == ["n0", "n1"]
    assert "0 nodes have answered, and no pair could be measured" in said(world)[-1]


def test_a_node_that_could_not_listen_is_not_accused() -> None:
    world = held()
    told(world, unfit="n0")
    assert world.members() == ["n1", "n2"]
    assert not world.of(ActionDecided)


def test_the_others_begin_again_without_a_node_that_is_gone() -> None:
    world = held()
    world.gone("n1")
    world.tick(1.0)
    first, second = ordered(world)
    assert first.id != second.id
    assert [peer.node for peer in second.peers] == ["n0", "n2"]
    told(world)
    assert world.members() == ["n0", "n2"]


def test_too_few_are_left_and_those_who_come_are_measured() -> None:
    world = held(2, 2)
    world.gone("n1")
    assert (world.doc.phase, len(ordered(world))) == ("joining", 1)
    world.join("n3")
    assert [peer.node for peer in ordered(world)[-1].peers] == ["n0", "n3"]
    told(world)
    assert world.members() == ["n0", "n3"]


def test_a_node_that_comes_during_the_test_is_a_spare_unless_it_is_needed() -> None:
    world = held(2, 2)
    world.join("a0")  # before the others by its name
    told(world)
    assert world.members() == ["n0", "n1"]


def test_the_operator_stops_the_job_during_the_test() -> None:
    world = held()
    world.apply(StopJob(job="j", by="ann", reason="enough", origin="cli"))
    assert (world.doc.phase, world.doc.exit_code, world.doc.network) == ("stopped", 93, None)
    assert world.of(JobEnded)
    assert not world.of(RoundFormed)


def test_another_replica_goes_on_with_the_test_and_repeats_the_order() -> None:
    world = held()
    world.take_over()
    world.tick(0.1)
    first, second = ordered(world)
    assert first == second
    told(world)
    assert world.doc.phase == "forming"


def test_figures_that_come_again_or_of_another_test_change_nothing() -> None:
    world = held(2, 2)
    stranger = NetworkFigures(test="f" * 32, node="n0", fact="f")
    world.join("n0", network=stranger)
    world.join("n1", network=stranger)
    assert world.doc.network is not None
    assert not world.doc.network.figures
    told(world, "n0")
    told(world, "n0")
    assert [figures.node for figures in world.doc.network.figures] == ["n1"]
    told(world)
    assert world.doc.phase == "forming"
    assert "1000 to 1000 MiB/s" in said(world)[-1]


@pytest.mark.parametrize(
    ("wish", "is_of_code", "count"),
    [("first", False, 1), ("failures", False, 2), ("failures", True, 1)],
)
def test_after_failures_only_where_that_is_wanted_and_not_for_the_program(
    wish: str, is_of_code: bool, count: int
) -> None:
    world = held(2, 2, network_test=wish)
    told(world)
    world.run()
    world.report("n0", "rank_exited", rank=0, exit_code=1, is_of_code=is_of_code)
    world.back("n0", "n1")
    world.tick(1.0)
    assert len(ordered(world)) == count
    if count == 2:
        assert (world.doc.phase, world.doc.round) == ("joining", 1)
        told(world)
    assert world.doc.round == 2


def test_the_next_allocation_measures_its_nodes_again() -> None:
    world = held(2, 2)
    world.leave("n0")
    world.leave("n1")
    assert world.doc.network is None
    world.join("n0", "n1", allocation="b", instance="n-2")
    assert len(ordered(world)) == 2


def test_the_brake_keeps_who_is_slow() -> None:
    world = World(spec(2, network_test="first", spares=1))
    world.control = JobControl(is_braked=True)
    world.join(*names(3))
    told(world, n0=0.0)
    assert world.members() == ["n0", "n1"]
