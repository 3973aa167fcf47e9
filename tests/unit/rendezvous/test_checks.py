"""A probe that fails while a round runs: compared between nodes, before a node is accused."""

import pytest

from everstep.messages import (
    ActionDecided,
    ActionTaken,
    CheckResult,
    IncidentOpened,
    LeaveJob,
    RoundEnded,
    RunChecks,
    StopRanks,
)
from everstep_services.rendezvous.domain.events import JobControl
from tests.unit.rendezvous.world import World, spec

FACT = "f" * 32


def running(nodes: int = 3, *, spares: int = 0) -> World:
    """A round that has run for a while; its spares are `s0`, `s1` …"""
    world = World(spec(nodes), check_compare_s=10.0).started(*(f"n{n}" for n in range(nodes)))
    world.join(*(f"s{number}" for number in range(spares)))
    world.tick(60)
    return world


def fails(world: World, node: str = "n1", policy: str = "end_round", check: str = "nic") -> None:
    world.report(
        node, "check_failed", check=check, policy=policy, reason="mlx5_0 is down", fact=FACT
    )


def answers(world: World, node: str, state: str, check: str = "nic") -> None:
    world.report(node, "check_compared", check=check, check_state=state, reason="")


def comparisons(world: World) -> list[RunChecks]:
    return [order for _, order in world.orders if isinstance(order, RunChecks)]


def test_a_node_is_accused_when_its_check_fails_and_passes_elsewhere() -> None:
    world = running(spares=1)
    answers(world, "s0", "ok")
    assert world.doc.checks == (), "nobody has asked yet"
    fails(world)
    (order,) = comparisons(world)
    assert (order.occasion, order.checks) == ("compare", ("nic",))
    assert world.doc.phase == "running", "the others are asked first"

    answers(world, "n0", "ok")
    answers(world, "n2", "warning")
    assert world.doc.phase == "running", "the spare is asked, too"
    answers(world, "s0", "ok")
    assert world.doc.phase == "ending", "all have answered: nothing is waited for"
    (incident,) = world.of(IncidentOpened)
    assert (incident.trigger, incident.node, incident.trigger_fact) == ("check_failed", "n1", FACT)
    assert "mlx5_0 is down" in incident.reason
    assert "fails on 1 of 4 nodes, and passes on 3" in incident.reason
    assert [ended.cause for ended in world.of(RoundEnded)] == ["check_failed"]
    assert world.doc.checks == ()


def test_a_check_that_fails_on_all_nodes_accuses_none() -> None:
    world = running()
    fails(world)
    answers(world, "n0", "failed")
    answers(world, "n2", "failed")
    assert world.doc.phase == "running"
    (decided,) = world.of(ActionDecided)
    assert (decided.mode, decided.rule, decided.evidence) == ("observe", "checks.shared", (FACT,))
    assert "accuses no node" in decided.reason

    fails(world, "n0")
    world.tick(100)
    assert len(world.of(ActionDecided)) == len(comparisons(world)) == 1, "asked once in minutes"
    world.tick(200)
    fails(world, "n2")
    assert len(comparisons(world)) == 2


@pytest.mark.parametrize("state", ["unknown", "unsupported", ""])
def test_a_check_that_no_other_node_can_run_accuses_none(state: str) -> None:
    world = running()
    fails(world)
    if state:
        answers(world, "n0", state)
    world.tick(11)
    assert world.doc.phase == "running"
    assert "no other node could confirm it" in world.of(ActionDecided)[0].reason


def test_two_nodes_of_two_fail_together_and_neither_is_accused() -> None:
    world = running(2)
    fails(world, "n0")
    fails(world, "n1")
    assert world.doc.phase == "running"
    assert "they share its cause" in world.of(ActionDecided)[0].reason


def test_a_silent_node_delays_the_decision_for_a_bounded_time() -> None:
    world = running(spares=1)
    fails(world)
    answers(world, "n0", "ok")
    world.tick(9)
    assert world.doc.phase == "running"
    world.tick(2)
    assert world.doc.phase == "ending"


def test_a_node_that_passes_when_compared_is_not_accused() -> None:
    world = running()
    fails(world)
    for node in ("n0", "n1", "n2"):
        answers(world, node, "ok")
    assert world.doc.phase == "running"
    assert world.doc.checks == ()
    assert world.of(ActionDecided) == []


def test_a_recovered_probe_takes_its_accusation_back() -> None:
    world = running()
    fails(world)
    world.report("n1", "check_recovered", check="nic", reason="it passes again")
    world.tick(20)
    assert world.doc.phase == "running"
    assert world.doc.checks == ()


def test_a_single_node_has_nobody_to_compare_with_and_no_place_to_go_to() -> None:
    """Its round goes on: without another node it could only wait for this one."""
    world = running(1)
    fails(world, "n0")
    assert world.doc.phase == "running"
    assert comparisons(world) == []
    (decided,) = world.of(ActionDecided)
    assert (decided.mode, decided.rule, decided.evidence) == ("observe", "checks.no_place", (FACT,))
    assert "the round goes on with n0" in decided.reason


def test_a_check_that_fails_on_the_only_node_and_its_spare_ends_no_round() -> None:
    """Else the round would move from node to node for as long as the check fails."""
    world = running(1, spares=1)
    fails(world, "n0")
    assert len(comparisons(world)) == 1, "the spare can be compared"
    answers(world, "s0", "failed")
    assert world.doc.phase == "running"
    (decided,) = world.of(ActionDecided)
    assert (decided.mode, decided.rule) == ("observe", "checks.shared")
    assert "fails on 2 of 2 nodes, and passes on 0" in decided.reason
    world.tick(200)
    fails(world, "n0")
    assert len(comparisons(world)) == 1, "asked once in minutes"


def test_a_spare_that_passes_the_check_confirms_the_failure_of_the_only_node() -> None:
    world = running(1, spares=1)
    fails(world, "n0", policy="exclude")
    answers(world, "s0", "ok")
    assert world.doc.phase == "ending"
    (decided,) = world.of(ActionDecided)
    assert (decided.rule, decided.nodes_out) == ("checks.exclude", ("n0",))


def test_a_round_goes_on_where_the_check_fails_on_all_spares_too() -> None:
    world = running(4, spares=1)
    fails(world)
    for node in ("n0", "n2", "n3"):
        answers(world, node, "ok")
    answers(world, "s0", "failed")
    assert world.doc.phase == "running"
    (decided,) = world.of(ActionDecided)
    assert decided.rule == "checks.no_place"
    assert "since no spare passes the check (s0 fails it, too)" in decided.reason
    world.join("s1")
    world.tick(250)
    fails(world)
    for node in ("n0", "n2", "n3", "s1"):
        answers(world, node, "ok")
    answers(world, "s0", "failed")
    assert world.doc.phase == "ending", "there is a place now"


def test_a_spare_that_fails_the_check_does_not_get_the_slot() -> None:
    world = running(4, spares=2)
    fails(world)
    for node in ("n0", "n2", "n3", "s1"):
        answers(world, node, "ok")
    answers(world, "s0", "failed")
    assert world.doc.phase == "ending"
    assert set(stops(world)) == {("nic", ("n1", "s0"))}, "its agent hears it, and is unfit"
    failed = (CheckResult(check="nic", state="failed"),)
    world.back("n1", checks=failed)
    world.back("n0", "n2", "n3")
    assert world.members() == ["n0", "s1", "n2", "n3"]


def test_a_job_that_may_shrink_ends_the_round_without_a_spare() -> None:
    world = World(spec(2, nodes_min=1), check_compare_s=10.0).started("n0", "n1")
    fails(world)
    answers(world, "n0", "ok")
    assert world.doc.phase == "ending"


def test_a_node_that_must_leave_leaves_without_a_spare() -> None:
    """`exclude` wants the node out; a scheduler may bring another one."""
    world = running(3)
    fails(world, "n1", policy="exclude")
    fails(world, "n2", policy="end_round")
    world.report("n2", "check_recovered", check="nic", reason="it passes again")
    answers(world, "n0", "ok")
    assert world.doc.phase == "ending"
    assert stops(world) == [("nic", ("n1",))]


def test_a_spare_that_does_not_answer_may_still_have_the_slot() -> None:
    """A spare of an older release does not answer."""
    world = running(2, spares=1)
    fails(world)
    answers(world, "n0", "ok")
    world.tick(11)
    assert world.doc.phase == "ending"


def test_only_the_result_of_a_comparison_is_taken_from_a_spare() -> None:
    world = running(2, spares=1)
    assert not world.report("s0", "check_failed", check="nic", policy="end_round").is_current
    assert not world.report("s0", "rank_exited", rank=0, exit_code=1).is_current
    fails(world)
    assert not world.report("s0", "check_compared", instance="x", check="nic").is_current
    assert world.report("s0", "check_compared", check="nic", check_state="ok", step=9).is_current
    assert world.doc.round_step != 9


def test_the_brake_and_the_mode_of_restarts_keep_the_round() -> None:
    for control in (JobControl(is_braked=True), JobControl(modes={"restart": "observe"})):
        world = running()
        world.control = control
        fails(world)
        fails(world)
        assert world.doc.phase == "running"
        (decided,) = world.of(ActionDecided)
        assert (decided.mode, decided.rule) == ("observe", "restart.observe")


def test_exclude_sends_the_node_away_for_good_once_its_ranks_are_gone() -> None:
    world = running(2)
    fails(world, policy="exclude")
    answers(world, "n0", "ok")
    assert world.doc.phase == "ending"
    seat = next(seat for seat in world.doc.seats if seat.node == "n1")
    assert seat.is_leaving
    (told,) = world.back("n1", checks=(CheckResult(check="nic", state="failed"),))  # it still fails
    assert (told.standing, told.exit_code) == ("leaving", 90)
    sent = [(to, order.state) for to, order in world.orders if isinstance(order, LeaveJob)]
    assert sent == [("n1", "excluded")]


def test_a_node_that_leaves_is_named_with_the_check_and_the_evidence() -> None:
    """Health keeps the node out of other jobs by this decision."""
    world = running(3)
    fails(world, policy="exclude")
    answers(world, "n0", "ok")
    answers(world, "n2", "ok")
    (decided,) = world.of(ActionDecided)
    assert (decided.action, decided.mode, decided.rule) == ("exclude", "enforce", "checks.exclude")
    assert (decided.check, decided.nodes_out, decided.evidence) == ("nic", ("n1",), (FACT,))
    assert "n1 leaves the job" in decided.reason
    assert "mlx5_0 is down (nic fails on 1 of 3 nodes, and passes on 2)" in decided.reason
    (incident,) = world.of(IncidentOpened)
    assert decided.incident == incident.incident
    assert [(taken.decision, taken.outcome) for taken in world.of(ActionTaken)] == [
        (decided.id, "done")
    ]


def test_the_only_node_of_a_job_leaves_by_a_rule_that_confirms_nothing() -> None:
    world = running(1)
    fails(world, "n0", policy="exclude")
    (decided,) = world.of(ActionDecided)
    assert (decided.rule, decided.nodes_out) == ("checks.alone", ("n0",))


def stops(world: World) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (order.check, order.accused) for _, order in world.orders if isinstance(order, StopRanks)
    ]


def test_the_order_to_stop_names_the_check_and_the_accused_nodes() -> None:
    """A node that fails another check, which all share, is not accused with them."""
    world = running(3, spares=1)
    for node in ("n0", "n1", "n2"):
        fails(world, node, check="site:share")
    answers(world, "s0", "failed", check="site:share")
    fails(world, "n1")
    for node in ("n0", "n2", "s0"):
        answers(world, node, "ok")
    assert world.doc.phase == "ending"
    assert set(stops(world)) == {("nic", ("n1",))}


def test_a_failure_that_nobody_compared_accuses_no_node_while_a_round_ends() -> None:
    world = running(3)
    world.report("n0", "rank_exited", rank=0, exit_code=1)
    assert world.doc.phase == "ending"
    fails(world, "n2")
    assert all(accused == () for _, accused in stops(world))


def test_exclude_only_ends_the_round_where_exclusions_observe() -> None:
    world = running(2, spares=1)
    world.control = JobControl(modes={"exclude": "observe"})
    fails(world, policy="exclude")
    answers(world, "n0", "ok")
    answers(world, "s0", "ok")
    assert world.doc.phase == "ending"
    assert not any(seat.is_leaving for seat in world.doc.seats)
    assert "exclude.observe" in [decided.rule for decided in world.of(ActionDecided)]


def test_a_report_about_an_earlier_round_changes_nothing() -> None:
    world = running()
    world.report("n1", "check_failed", round=world.doc.round - 1, check="nic", policy="end_round")
    assert comparisons(world) == []


def test_an_agent_that_starts_anew_amid_a_comparison_takes_its_accusation_with_it() -> None:
    """The new agent has measured nothing; it is accused only by what it measures itself."""
    world = running()
    fails(world, policy="exclude")
    before = world.doc.round
    world.gone("n1")
    world.join("n1", instance="n1-2")
    world.tick(20)
    assert world.doc.checks == ()
    for node in ("n0", "n2"):
        world.report(node, "check_compared", round=before, check="nic", check_state="ok")
    world.tick(20)
    assert [fact for fact in world.of(ActionDecided) if fact.action == "exclude"] == []
    assert not any(seat.is_leaving for seat in world.doc.seats)
    assert all(ended.cause != "check_failed" for ended in world.of(RoundEnded))
