"""Every decision is on record, with what else was possible and what came of it (A4.6)."""

from datetime import timedelta

import pytest

from everstep.messages import (
    ActionDecided,
    ActionTaken,
    AwaitRound,
    DrainNode,
    Exclusion,
    LeaveJob,
    NodeLeft,
    RestartJob,
    StopJob,
)
from everstep_services.rendezvous.domain.events import JobControl
from tests.unit.rendezvous.world import WALL, World, spec


def ends(world: World) -> list[tuple[str, str]]:
    """What was decided, in order, and what came of each; `open` where nothing has so far."""
    taken = {one.decision: one for one in world.of(ActionTaken)}
    assert len(taken) == len(world.of(ActionTaken)), "a decision has one end"
    return [
        (one.action, taken[one.id].outcome if one.id in taken else "open")
        for one in world.of(ActionDecided)
    ]


def crash(world: World, **fields: object) -> None:
    world.report("n0", "rank_exited", exit_code=1, **fields)
    world.back(*world.members())


def test_a_restart_is_done_when_all_ranks_of_the_next_round_run() -> None:
    world = World(spec(1)).started("n0")
    crash(world)
    assert ends(world) == [("restart", "open")]
    world.tick(3)
    world.run()
    assert ends(world) == [("restart", "done")]
    [decided], [taken] = world.of(ActionDecided), world.of(ActionTaken)
    assert decided.considered[0].action == "stop"
    assert (taken.decision, taken.incident, taken.took_s) == (decided.id, decided.incident, 3)
    assert taken.reason == "all ranks of round 2 run"
    assert world.doc.decisions == ()


def test_a_restart_whose_ranks_never_all_ran_has_failed() -> None:
    world = World(spec(1)).started("n0")
    crash(world)
    world.report("n0", "start_failed", reason="no such file")
    assert ends(world)[0] == ("restart", "failed")
    assert "no such file" in world.of(ActionTaken)[0].reason


def test_a_stop_is_done_at_once() -> None:
    world = World(spec(1, max_restarts=0)).started("n0")
    crash(world)
    assert ends(world) == [("stop", "done")]
    assert "code 1" in world.of(ActionTaken)[0].reason


def test_waiting_for_a_lost_node_is_a_decision_and_its_end_as_well() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.gone("n1")
    world.back("n0")
    world.tick(5)
    assert ends(world) == [("restart", "open"), ("wait", "open")]
    waits = world.of(ActionDecided)[1]
    assert (waits.rule, waits.nodes_out) == ("wait.not_enough_nodes", ("n1",))
    assert {one.action for one in waits.considered} == {"shrink", "stop"}
    world.join("n2")
    assert ends(world) == [("restart", "open"), ("wait", "done")]
    world.run()
    assert ends(world) == [("restart", "done"), ("wait", "done")]


def test_nodes_that_never_come_make_both_fail() -> None:
    world = World(spec(2), join_within_s=60).started("n0", "n1")
    world.gone("n1")
    world.back("n0")
    world.tick(61)
    assert ends(world) == [("restart", "failed"), ("wait", "failed")]


def test_what_a_person_decides_overtakes_what_was_decided_before() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.gone("n1")
    world.back("n0")
    world.tick(5)
    world.apply(StopJob(job="j", by="ann", reason="enough", save_first=False))
    assert ends(world) == [("restart", "overtaken"), ("wait", "overtaken")]


def test_waiting_for_the_first_round_answers_no_loss_and_is_only_said() -> None:
    world = World(spec(2))
    world.join("n0")
    world.tick(5)
    assert ends(world) == []
    assert isinstance(world.orders[-1][1], AwaitRound)


def test_a_round_that_could_be_larger_waits_for_that_and_says_so() -> None:
    world = World(spec(1, nodes_max=3), elastic_wait_s=10)
    world.join("n0")
    world.tick(5)
    reason = world.orders[-1][1].reason
    assert reason == "waits up to 10 s for round 1: 1 node is here, and up to 3 are wanted"
    world.tick(5)
    assert world.doc.phase == "forming"


def test_the_last_call_for_a_spare_is_told_with_its_own_number_and_limit() -> None:
    world = World(spec(2, spares=1), last_call_s=5, say_waiting_after_s=1)
    world.join("n0", infra_rank=0)
    world.join("n1", infra_rank=1)
    world.tick(2)
    reason = world.orders[-1][1].reason
    assert reason == "waits up to 5 s for round 1: 2 nodes are here, and up to 3 are wanted"
    world.tick(3)
    assert world.doc.phase == "forming"


def test_advice_says_its_own_rule_and_that_nothing_was_done() -> None:
    world = World(spec(1, no_progress_limit=1))
    world.join("n0")
    world.run(stepped=False)
    crash(world)
    advice, restart = world.of(ActionDecided)
    assert (advice.action, advice.mode, advice.rule) == ("stop", "observe", "stop.no_progress")
    assert restart.action == "restart"
    assert ends(world) == [("stop", "observed"), ("restart", "open")]


def test_a_stall_that_is_only_observed_is_on_record_as_that() -> None:
    world = World(spec(1)).started("n0")
    world.control = JobControl(is_braked=True)
    world.report("n0", "rank_stalled")
    assert ends(world) == [("restart", "observed")]


def test_an_exclusion_is_on_record_once_enforced_or_observed() -> None:
    found = Exclusion(node="n1", by="ann", reason="bad cable", until=WALL + timedelta(seconds=99))
    world = World(spec(2))
    world.control = JobControl(exclusions=(found,))
    for _ in range(2):
        world.join("n1")
    assert ends(world) == [("exclude", "done")]
    assert world.of(ActionDecided)[0].nodes_out == ("n1",)
    world.control = JobControl(exclusions=(found,), is_braked=True)
    for _ in range(2):
        assert world.join("n1")[0].is_accepted
    assert ends(world) == [("exclude", "done"), ("exclude", "observed")]


def test_a_backoff_is_said_to_all_in_one_line_and_to_those_who_ask_later() -> None:
    """The delay and its cause reach every agent (A4.3)."""
    world = World(spec(1))
    world.join("n0")
    for _ in range(2):
        world.run(stepped=False)
        world.report("n0", "rank_exited", exit_code=1, reason="rank 0 exited with 1")
        world.back("n0")
    said = (
        "waits 5 s before round 3: 2 rounds in a row failed within 60 s without known progress; "
        "the last one: rank 0 exited with 1"
    )
    waits = [(node, one.reason) for node, one in world.orders if isinstance(one, AwaitRound)]
    assert waits == [(None, said)]
    reply = world.join("n0")[0]
    assert isinstance(reply.order, AwaitRound)
    assert reply.order.reason == said
    world.tick(5)
    assert (world.doc.phase, world.doc.waiting) == ("forming", "")


@pytest.mark.parametrize(
    ("enforce", "second", "is_named"),
    [((), "same", True), ((), "another", False), (("stop",), "same", False)],
)
def test_a_failure_that_comes_again_is_said_with_its_remedy(
    enforce: tuple[str, ...], second: str, is_named: bool
) -> None:
    world = World(spec(1, enforce=enforce))
    world.control = JobControl(is_braked=bool(enforce))  # it was asked for, and must not act
    world.join("n0")
    for fingerprint in ("same", second):
        world.run(stepped=False)
        world.report("n0", "rank_exited", exit_code=1, fingerprint=fingerprint)
        world.back("n0")
    said = [one.reason for _, one in world.orders if isinstance(one, AwaitRound)][-1]
    assert said.endswith("; --stop-on-repeat ends the job instead") is is_named


def dismissed(world: World, node: str) -> list[int]:
    return [one.exit_code for to, one in world.orders if to == node and isinstance(one, LeaveJob)]


def test_a_drained_node_without_which_the_job_cannot_go_on_asks_to_be_requeued() -> None:
    """Its agent exits with 90 (A12.3)."""
    world = World(spec(2)).started("n0", "n1")
    world.apply(DrainNode(job="j", node="n1", by="ann", reason="fan"))
    world.back("n0", "n1")
    assert dismissed(world, "n1") == [90]
    assert world.join("n1")[0].exit_code == 90


def test_the_end_of_a_drained_node_is_on_record_and_explains_nothing() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n0", "rank_exited", exit_code=1)
    world.apply(DrainNode(job="j", node="n1", by="ann", reason="fan"))
    world.back("n1")
    before = world.doc.incident
    world.leave("n1", "excluded", exit_code=90)
    (left,) = world.of(NodeLeft)
    assert (left.node, left.exit_code) == ("n1", 90)
    assert world.doc.phase == "ending"
    assert before is not None
    assert world.doc.incident == before
    world.back("n0")
    assert {seat.node for seat in world.doc.seats if seat.stage != "gone"} == {"n0"}


def test_a_drained_node_whose_job_goes_on_ends_well() -> None:
    world = World(spec(1, nodes_max=2), elastic_wait_s=1)
    world.join("n0", "n1")
    world.run()
    world.apply(RestartJob(job="j", by="ann", reason="slow", round=1, without_nodes=("n1",)))
    world.back("n0", "n1")
    assert dismissed(world, "n1") == [0]


def test_the_only_node_of_a_job_that_is_drained_leaves_a_job_that_is_not_done() -> None:
    world = World(spec(1)).started("n0")
    world.apply(DrainNode(job="j", node="n0", by="ann", reason="fan"))
    world.back("n0")
    assert dismissed(world, "n0") == [90]
    world.leave("n0", "excluded", exit_code=90)
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 90)


def test_a_node_that_stays_unfit_while_no_round_runs_asks_to_be_requeued() -> None:
    world = World(spec(1), join_within_s=60)
    world.control = JobControl(exclusions=(Exclusion(node="n0", by="ann", reason="bad cable"),))
    assert world.join("n0")[0].exit_code is None
    world.now += 59
    assert world.join("n0")[0].exit_code is None
    world.now += 2
    reply = world.join("n0")[0]
    assert (reply.exit_code, reply.standing) == (90, "refused")
    assert "bad cable" in reply.reason


def test_a_node_that_is_unfit_beside_a_round_that_runs_is_asked_to_wait() -> None:
    world = World(spec(1), join_within_s=60).started("n0")
    world.control = JobControl(exclusions=(Exclusion(node="n1", by="ann", reason="bad cable"),))
    world.join("n1")
    world.now += 600
    reply = world.join("n1")[0]
    assert (reply.exit_code, reply.retry_after_s) == (None, 30)
    world.gone("n0")
    assert world.doc.phase == "joining"
    assert world.join("n1")[0].exit_code is None  # from now on it counts
    world.now += 61
    assert world.join("n1")[0].exit_code == 90


def test_the_steps_that_an_agent_tells_as_it_leaves_are_progress() -> None:
    world = World(spec(2, no_progress_limit=3)).started("n0", "n1")
    crash(world, step=40)
    world.tick(60)
    for node in world.members():
        world.report(node, "started")
    world.report("n0", "first_step", step=31)
    world.leave("n1", last_step=90)
    world.back("n0")
    assert "3 of 3 rounds without known progress left" in world.of(ActionDecided)[-1].reason
