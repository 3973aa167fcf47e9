"""Who is let in, who is not, and the answer that they get."""

from datetime import timedelta
from typing import Any

import pytest

from everstep.messages import (
    ActionDecided,
    AllocationEnded,
    AllocationStarted,
    CheckResult,
    DrainNode,
    Exclusion,
    JobChanged,
    JobEnded,
    JobStarted,
    LeaveJob,
    NodeJoined,
    NodeRefused,
    OperatorActed,
    RestartJob,
    StopJob,
)
from everstep_services.rendezvous.domain.events import JobControl, Probed
from tests.unit.rendezvous.world import WALL, World, spec

FAILED = (CheckResult(check="gpu", state="failed", reason="XID 79"),)


@pytest.mark.parametrize(
    ("fields", "cause", "said", "exit_code"),
    [
        ({"checks": FAILED}, "unhealthy", "gpu: XID 79", None),
        ({"version": "7.0.0"}, "wrong_version", "7.0.0", 2),
        ({"spec": spec(3)}, "different_job", "nodes_min is 3 here and 2 in the job", 2),
        ({"infra_rank": 0}, "misconfigured", "n1 and n0", 2),
        ({"ranks": 0}, "misconfigured", "no process", 2),
    ],
)
def test_refusals_name_the_cause_and_the_remedy(
    fields: dict[str, Any], cause: str, said: str, exit_code: int | None
) -> None:
    world = World(spec(2))
    world.join("n0", infra_rank=0)
    for _ in range(3):
        reply = world.join("n1", **fields)[0]
        assert (reply.is_accepted, reply.cause, reply.exit_code) == (False, cause, exit_code)
        assert said in reply.reason
    assert [fact.cause for fact in world.of(NodeRefused)] == [cause]
    assert world.join("n1", infra_rank=1)[0].is_accepted


def test_a_node_that_is_drained_and_kept_out_is_sent_away() -> None:
    """It is not left waiting for the end of its exclusion: the job goes on without it."""
    world = World(spec(1)).started("n0")
    world.join("n1")
    world.control = JobControl(exclusions=(Exclusion(node="n0", by="straggler", reason="slow"),))
    world.apply(DrainNode(job="j", node="n0", by="straggler", reason="slow"))
    world.back("n0")
    assert world.members() == ["n1"]
    assert ("n0", LeaveJob) in [(node, type(order)) for node, order in world.orders]
    reply = world.join("n0")[0]
    assert (reply.is_accepted, reply.exit_code) == (True, 0)
    assert world.of(NodeRefused) == []


@pytest.mark.parametrize("state", ["warning", "unknown", "unsupported", "ok"])
def test_only_failed_checks_count_against_a_node(state: str) -> None:
    world = World(spec(1))
    assert world.join("n0", checks=(CheckResult(check="gpu", state=state),))[0].is_accepted


def test_an_excluded_node_is_refused_until_its_time_is_over_or_the_brake_is_on() -> None:
    """An exclusion has an end (A10.3, A15.4)."""
    until = WALL + timedelta(seconds=100)
    found = Exclusion(node="n0", by="ann", reason="bad cable", until=until)
    world = World(spec(2))
    world.join("n1")
    world.control = JobControl(exclusions=(found,))
    assert world.join("n0")[0].cause == "excluded"
    world.control = JobControl(exclusions=(found,), is_braked=True)
    assert world.join("n0")[0].is_accepted
    world = World(spec(1))
    world.control = JobControl(exclusions=(found,))
    world.now += 200
    assert world.join("n0")[0].is_accepted


def test_a_second_agent_with_the_same_node_id_replaces_a_dead_one() -> None:
    world = World(spec(2)).started("n0", "n1")
    reply = world.join("n1", instance="n1-2")[0]
    assert (reply.is_accepted, reply.cause, reply.exit_code) == (False, "duplicate", None)
    assert [probe.instance for probe in world.last.probes] == ["n1-1"]
    world.gone("n1")
    assert world.doc.phase == "ending"
    world.join("n1", instance="n1-2")
    world.back("n0")
    assert world.members() == ["n0", "n1"]
    assert world.doc.seats[1].instance == "n1-2"


def test_a_second_agent_with_the_same_node_id_is_refused_by_a_living_one() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join("n1", instance="n1-2")
    world.apply(Probed("n1", "n1-1", is_there=True))
    reply = world.join("n1", instance="n1-2")[0]
    assert (reply.cause, reply.exit_code) == ("duplicate", 2)
    assert "--node-id" in reply.reason
    assert world.doc.phase == "running"


def test_what_an_agent_answered_before_it_died_does_not_keep_its_successor_out() -> None:
    """Killed a moment after a probe and started again at once, it had to take another name."""
    world = World(spec(2)).started("n0", "n1")
    world.apply(Probed("n1", "n1-1", is_there=True))
    world.now += 0.5
    reply = world.join("n1", instance="n1-2")[0]
    assert (reply.cause, reply.exit_code) == ("duplicate", None)
    assert [probe.instance for probe in world.last.probes] == ["n1-1"]
    world.gone("n1")
    world.join("n1", instance="n1-2")
    world.back("n0")
    assert world.doc.seats[1].instance == "n1-2"


def test_a_member_that_became_unhealthy_gives_its_slot_to_a_spare() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join("n2")
    world.report("n0", "rank_exited", exit_code=1)
    world.back("n1", checks=FAILED)
    world.back("n0")
    assert world.members() == ["n0", "n2"]


def test_joining_again_changes_nothing() -> None:
    world = World(spec(3))
    world.join("n0")
    before = world.doc
    for _ in range(3):
        world.join("n0")
    assert world.doc == before
    assert [len(world.of(kind)) for kind in (JobStarted, AllocationStarted, NodeJoined)] == [
        1,
        1,
        1,
    ]


def test_a_later_allocation_may_change_the_job() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.leave("n0", "preempted", exit_code=91)
    world.leave("n1", "preempted", exit_code=91)
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 91)
    assert [(it.state, it.exit_code) for it in world.of(AllocationEnded)] == [("preempted", 91)]
    assert world.join("n0")[0].cause == "job_over"
    world.spec = spec(1)
    assert world.join("n7", allocation="b")[0].is_accepted
    assert (world.doc.phase, world.doc.round, world.members()) == ("forming", 2, ["n7"])
    assert "nodes_min" in world.of(JobChanged)[0].changed


def test_a_job_that_is_done_takes_nobody_unless_it_changed() -> None:
    world = World(spec(1)).started("n0")
    world.report("n0", "finished")
    world.leave("n0", "done")
    reply = world.join("n0", allocation="b", instance="n0-2")[0]
    assert (reply.cause, reply.exit_code) == ("job_over", 0)
    world.spec = spec(1, config_fingerprint="g")
    assert world.join("n0", allocation="c", instance="n0-3")[0].is_accepted


def test_an_operator_stops_the_job() -> None:
    world = World(spec(1)).started("n0")
    world.apply(StopJob(job="j", by="ann", reason="enough", save_first=True))
    assert world.doc.phase == "running"
    world.tick(60)
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 93)
    assert isinstance(world.orders[-1][1], LeaveJob)
    assert [fact.state for fact in world.of(JobEnded)] == ["stopped"]


def test_an_operator_restarts_the_round_that_they_mean_and_it_costs_nothing() -> None:
    world = World(spec(1, max_restarts=0)).started("n0")
    world.apply(RestartJob(job="j", by="ann", reason="x", round=9))
    assert world.doc.phase == "running"
    world.apply(RestartJob(job="j", by="ann", reason="x", round=1))
    world.back("n0")
    assert (world.doc.phase, world.doc.round, world.doc.restarts) == ("forming", 2, 0)
    assert [fact.outcome for fact in world.of(OperatorActed)] == ["refused", "accepted"]


def test_a_drained_node_is_replaced_and_sent_away() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join("n2")
    world.apply(DrainNode(job="j", node="n1", by="ann", reason="fan"))
    world.back("n0", "n1")
    assert world.members() == ["n0", "n2"]
    assert ("n1", LeaveJob) in [(node, type(order)) for node, order in world.orders]
    assert world.join("n1")[0].exit_code == 0


def test_a_stall_is_left_alone_under_the_brake_and_a_death_is_not() -> None:
    """The decision is only observed (A15.4)."""
    world = World(spec(1)).started("n0")
    world.control = JobControl(is_braked=True)
    world.report("n0", "rank_stalled")
    world.report("n0", "rank_stalled")
    assert world.doc.phase == "running"
    assert [fact.mode for fact in world.of(ActionDecided)] == ["observe"]
    world.report("n0", "rank_exited", exit_code=1)
    assert world.doc.phase == "ending"
    world.back("n0")
    world.tick(1)
    assert (world.doc.round, world.doc.phase) == (2, "forming")


def test_a_spent_budget_ends_the_job_with_1_and_says_so() -> None:
    world = World(spec(1, max_restarts=1)).started("n0")
    for _ in range(2):
        world.report("n0", "rank_exited", exit_code=1, fact="a" * 32)
        world.back("n0")
        world.tick(1)
        if world.doc.phase == "forming":
            world.run()
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 1)
    decided = world.of(ActionDecided)[-1]
    assert (decided.action, decided.rule, decided.evidence) == (
        "stop",
        "stop.restarts_spent",
        ("a" * 32,),
    )
    assert decided.considered[0].action == "restart"


def test_pods_that_kubernetes_replaces_share_the_allocation_of_those_present() -> None:
    """Each pod draws an id of its own; after all have left, one begins the next allocation."""
    world = World(spec(2))
    for node in ("n0", "n1"):
        assert world.join(node, allocation=f"of-{node}", scheduler="kubernetes")[0].is_accepted
    assert (world.doc.allocation, world.doc.allocations) == ("of-n0", ("of-n0",))
    for node in ("n0", "n1"):
        world.leave(node, "preempted", exit_code=91)
    assert world.doc.phase == "stopped"
    again = world.join("n2", allocation="of-n2", scheduler="kubernetes")[0]
    assert (again.is_accepted, world.doc.allocation) == (True, "of-n2")
