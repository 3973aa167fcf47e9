"""Rounds form, run, end and form again; slots stay with their nodes."""

import time

import msgspec
import pytest

from everstep.bus.documents import packed
from everstep.messages import (
    DrainNode,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    NodeLeft,
    NodeLost,
    RoundDocument,
    RoundFormed,
    RoundStarted,
    RoundWaiting,
    StartRanks,
    StopRanks,
)
from everstep_services.rendezvous.domain.events import JobControl
from tests.unit.rendezvous.world import WALL, World, names, spec


def test_a_round_forms_with_the_last_node_that_it_needs() -> None:
    world = World(spec(2))
    assert world.join("n1")[0].standing == "waiting"
    reply = world.join("n0")[0]

    assert (reply.standing, reply.slot, reply.round) == ("member", 0, 1)
    assert isinstance(reply.order, StartRanks)
    orders = {node: order for node, order in world.orders if isinstance(order, StartRanks)}
    assert {
        node: (order.slot, order.first_rank, order.world_size) for node, order in orders.items()
    } == {
        "n0": (0, 0, 4),
        "n1": (1, 2, 4),
    }
    assert world.doc.phase == "forming"


def test_ranks_are_counted_from_what_each_node_runs() -> None:
    world = World(spec(3))
    world.join("a", ranks=1)
    world.join("b", ranks=4)
    world.join("c", ranks=2)
    formed = world.of(RoundFormed)[0]
    assert [(m.node, m.first_rank, m.ranks) for m in formed.members] == [
        ("a", 0, 1),
        ("b", 1, 4),
        ("c", 5, 2),
    ]
    assert formed.world_size == 7


def test_the_round_runs_when_the_last_member_says_so() -> None:
    world = World(spec(2))
    world.join("n0", "n1")
    assert world.report("n0", "started", warm_ranks=2).phase == "forming"
    assert world.report("n1", "started").phase == "running"
    assert [(fact.warm_ranks, fact.slowest_node) for fact in world.of(RoundStarted)] == [(2, "n1")]


def test_a_dead_rank_ends_the_round_and_the_same_nodes_form_the_next() -> None:
    world = World(spec(2)).started("n0", "n1")
    told = world.report("n1", "rank_exited", rank=3, exit_code=1, fact="f" * 32)

    assert told.is_current
    assert told.incident is not None
    assert told.phase == "ending"
    assert isinstance(world.orders[-1][1], StopRanks)
    assert world.orders[-1][0] is None
    world.back("n1")
    assert world.doc.phase == "ending"
    world.back("n0")
    assert (world.doc.phase, world.doc.round, world.members()) == ("forming", 2, ["n0", "n1"])
    world.run()
    assert [fact.outcome for fact in world.of(IncidentClosed)] == ["recovered"]


def test_nodes_that_are_lost_together_are_all_told() -> None:
    world = World(spec(3)).started("n0", "n1", "n2")
    world.gone("n1")
    world.gone("n2")
    world.gone("n2")
    assert world.doc.incident is not None
    assert world.doc.incident.node == "n1"
    told = [f"{node} is gone: its connection to the bus is closed" for node in ("n1", "n2")]
    assert world.doc.incident.reason == world.doc.end_reason == "; ".join(told)


def test_a_spare_takes_the_lost_nodes_slot_and_nobody_else_moves() -> None:
    world = World(spec(3))
    world.join("n0", "n1", "n2", "n3")
    world.run()
    assert world.join("n3")[0].standing == "spare"
    world.report("n0", "rank_exited", fingerprint="secondary:1", exit_code=1)
    world.gone("n1")
    world.back("n0", "n2")
    assert world.members() == ["n0", "n3", "n2"]
    replaced = world.of(RoundFormed)[-1].replaced
    assert [(it.slot, it.was, it.node) for it in replaced] == [(1, "n1", "n3")]


@pytest.mark.parametrize(
    ("control", "members"),
    [
        (JobControl(suspects={"n1": "3 strikes"}), ["n0", "n2"]),
        (JobControl(suspects={"n1": "3 strikes"}, is_braked=True), ["n0", "n1"]),
        (JobControl(suspects={"n1": "3 strikes"}, modes={"replace": "observe"}), ["n0", "n1"]),
        (JobControl(suspects={"n1": "3 strikes", "n2": "a check"}), ["n0", "n1"]),
    ],
)
def test_a_suspect_makes_way_for_a_spare_at_the_next_round_and_stays_as_one(
    control: JobControl, members: list[str]
) -> None:
    """Where there is a spare, a suspect node is skipped (A10.6)."""
    world = World(spec(2)).started("n0", "n1")
    world.join("n2")
    world.control = control
    world.tick(1)
    assert world.members() == ["n0", "n1"], "a round that runs is left alone"
    world.report("n0", "rank_exited", exit_code=1)
    world.back("n0", "n1")
    assert world.members() == members
    assert {seat.node for seat in world.doc.seats} == {"n0", "n1", "n2"}
    replaced = [it.reason for it in world.of(RoundFormed)[-1].replaced]
    assert replaced == (["n1 is suspect: 3 strikes"] if "n2" in members else [])


BROKEN = {"fingerprint": "abc", "exit_code": 1, "is_of_code": True}


def broken(world: World, *ranks: int) -> None:
    """These ranks cannot import what they need; then all nodes are back."""
    for rank in ranks:
        world.report(f"n{rank // 2}", "rank_exited", rank=rank, **BROKEN)
    world.back("n0", "n1")


def formed_again(world: World) -> World:
    for node in world.members():
        world.report(node, "started")
    return world


def test_a_script_that_no_rank_can_start_ends_the_job_after_one_more_try() -> None:
    """Every rank fails before a step: one more try, then the job ends (A4.1)."""
    world = World(spec(2))
    world.join("n0", "n1")
    formed_again(world)
    world.report("n0", "rank_exited", rank=0, **BROKEN)
    stop = world.orders[-1][1]
    assert isinstance(stop, StopRanks)
    assert stop.cause_within_s == 3.0, "the others are to show whether they fail alike"
    broken(world, 0, 1, 2, 3)
    world.tick(4.9)
    assert world.doc.phase == "ending"
    world.tick(0.2)
    broken(formed_again(world), 3, 2, 1, 0)
    assert (world.doc.phase, world.doc.exit_code, world.doc.round) == ("stopped", 93, 2)
    assert "cannot start" in world.doc.reason
    assert world.of(JobEnded)[-1].state == "failed", "nobody has stopped it"
    assert world.join("n0")[0].exit_code == 93, "of this allocation nobody is needed"
    assert "repair the script" in world.join("n0")[0].reason
    assert world.join("n0", allocation="b")[0].is_accepted, "the script may be mended"


@pytest.mark.parametrize("what", ["one rank, told again", "all but one", "a restarted replica"])
def test_a_script_that_some_ranks_can_start_is_tried_again(what: str) -> None:
    """A file system that one node cannot read stops no job."""
    world = World(spec(2))
    world.join("n0", "n1")
    for _ in range(5):
        formed_again(world)
        ranks = {"one rank, told again": (0, 0, 0, 0), "all but one": (0, 1, 2)}
        if what == "a restarted replica":
            world.report("n0", "rank_exited", rank=0, **BROKEN)
            world.take_over()
        broken(world, *ranks.get(what, (1, 2, 3)))
        world.tick(400)
        assert world.doc.phase == "forming"


def test_a_script_that_has_made_a_step_once_is_tried_again() -> None:
    world = World(spec(2)).started("n0", "n1")
    for _ in range(5):
        broken(world, 0, 1, 2, 3)
        world.tick(400)
        assert world.doc.phase == "forming"
        formed_again(world)


def test_reports_of_an_old_round_or_another_agent_change_nothing() -> None:
    """A late report is refused, and the document stays as it was (A2.3)."""
    world = World(spec(2)).started("n0", "n1")
    before = world.doc
    assert not world.report("n0", "rank_exited", round=0).is_current
    assert not world.report("n0", "rank_exited", instance="another").is_current
    assert not world.report("n0", "rank_exited", slot=1).is_current
    assert world.doc == before


def test_an_agent_that_was_away_for_two_rounds_comes_back_as_a_spare() -> None:
    """Its old round is refused, and it joins as a spare (A2.3)."""
    world = World(spec(2), last_call_s=1.0).started("n0", "n1")
    world.join("n2")
    world.report("n0", "rank_exited", exit_code=1)
    world.back("n0")
    world.tick(10)
    assert world.members() == ["n0", "n2"]
    world.run()
    stale = world.join("n1", running=world.order("n1"))[0]
    assert (stale.is_accepted, stale.cause) == (False, "stale")
    assert isinstance(stale.order, StopRanks)
    assert not world.report("n1", "rank_exited", round=1, instance="n1-1").is_current
    assert world.back("n1")[0].standing == "spare"
    assert world.members() == ["n0", "n2"]


def test_a_slow_holder_is_waited_for_and_a_dead_one_is_not() -> None:
    world = World(spec(2, stop_grace_s=3)).started("n0", "n1")
    world.join("n2")
    world.report("n0", "rank_exited", exit_code=1)
    world.back("n0")
    world.tick(3)
    assert world.doc.phase == "ending"
    world.back("n1")
    assert world.members() == ["n0", "n1"]


def test_without_a_spare_the_job_waits_and_then_gives_up_with_the_names() -> None:
    world = World(spec(2), join_within_s=60).started("n0", "n1")
    world.gone("n1")
    world.back("n0")
    assert world.doc.phase == "joining"
    world.tick(5)
    assert world.of(RoundWaiting)[-1].missing == ("n1",)
    world.tick(60)
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 92)
    (closed,) = world.of(IncidentClosed)
    assert closed.reason.startswith("n1 is gone"), "what began it, and then what ended it"
    assert "1 of 2 nodes joined within 60 s" in closed.reason
    assert "n1" in world.doc.reason
    assert not world.of(JobEnded)


def test_it_is_done_when_every_slot_has_finished_however_late() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n0", "finished")
    assert world.doc.phase == "running"
    world.gone("n0")
    assert world.doc.phase == "running"
    world.report("n1", "finished")
    assert (world.doc.phase, world.doc.exit_code) == ("done", 0)
    assert [(fact.state, fact.exit_code) for fact in world.of(JobEnded)] == [("done", 0)]
    assert world.join("n5")[0].exit_code == 0


def test_a_node_that_has_finished_and_is_gone_is_needed_again_only_if_others_fail() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n0", "finished")
    world.gone("n0")
    assert "have finished" in world.join("n0", instance="n0-2")[0].reason
    world.report("n1", "rank_exited", exit_code=1)
    world.join("n0", instance="n0-2")
    world.back("n1")
    assert (world.doc.phase, world.members()) == ("forming", ["n0", "n1"])


def test_an_agent_that_was_taken_for_lost_stops_its_ranks_before_it_is_used_again() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.gone("n1")
    world.back("n0")
    reply = world.join("n1", running=world.order("n1"))[0]
    assert isinstance(reply.order, StopRanks)
    assert world.doc.phase == "joining"
    world.back("n1")
    assert (world.doc.phase, world.members()) == ("forming", ["n0", "n1"])


def test_a_member_whose_ranks_still_run_is_waited_for() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n0", "rank_exited", exit_code=1)
    world.back("n0")
    assert isinstance(world.join("n1", running=world.order("n1"))[0].order, StopRanks)
    assert world.doc.phase == "ending"


def test_a_question_that_was_long_on_its_way_ends_no_round() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join("n1")  # asked before its ranks ran, heard after
    assert world.doc.phase == "running"
    world.back("n1")  # it had ranks of this round, and has none
    assert world.doc.phase == "ending"


def test_silence_found_by_health_ends_the_round() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.tick(30)
    world.apply(silent("n1"))
    assert world.doc.phase == "ending"
    assert world.of(IncidentOpened)[0].trigger == "node_lost"


def silent(node: str) -> NodeLost:
    return NodeLost(
        id="1" * 32,
        job="j",
        at=WALL,
        source="health",
        node=node,
        silence_s=4,
        limit_s=3,
        reason=f"{node} was silent for 4 s (limit 3 s)",
    )


def test_a_node_that_has_just_spoken_is_lost_when_health_still_says_so_past_the_limit() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.tick(2)
    world.apply(silent("n1"))
    assert world.doc.phase == "running"
    world.tick(1)
    world.apply(silent("n1"))
    assert world.doc.phase == "ending"


def test_whom_a_replica_has_never_heard_it_gives_the_time_of_the_limit() -> None:
    """Another may have heard it; or the finding is about the agent before it."""
    world = World(spec(2)).started("n0", "n1")
    world.tick(30)
    world.take_over()
    world.apply(silent("n1"))
    assert world.doc.phase == "running"
    world.tick(3)
    world.apply(silent("n1"))
    assert world.doc.phase == "ending"


def test_an_elastic_round_starts_with_fewer_shrinks_and_grows_at_the_next_round() -> None:
    world = World(spec(2, nodes_max=4), elastic_wait_s=10)
    world.join("n0", "n1", "n2")
    assert world.doc.phase == "joining"
    world.tick(10)
    assert world.members() == ["n0", "n1", "n2"]
    world.run()
    world.gone("n1")
    world.back("n0", "n2")
    world.tick(10)
    assert world.members() == ["n0", "n2"]
    assert world.of(RoundFormed)[-1].cause == "shrink"
    world.run()
    assert world.join("n3", "n4")[0].standing == "spare"
    world.report("n0", "rank_exited", exit_code=1)
    world.back("n0", "n2")
    assert world.members() == ["n0", "n2", "n3", "n4"]
    assert world.of(RoundFormed)[-1].cause == "grow"


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_node_that_is_lost_after_the_end_of_a_round_did_not_end_it(is_heard: bool) -> None:
    world = World(spec(3)).started("n0", "n1", "n2")
    world.tick(60)
    world.report("n0", "rank_exited", exit_code=1, rank=1)
    world.tick(0.28)
    if is_heard:
        world.back("n1")
    world.gone("n1")
    assert world.doc.incident is not None
    assert world.doc.incident.trigger == ("rank_exited" if is_heard else "node_lost")


def test_agents_are_told_what_ended_a_round_and_not_what_the_next_one_waits_for() -> None:
    world = World(spec(3)).started("n0", "n1", "n2")
    world.apply(DrainNode(job="j", node="n1", by="ann", reason="fan"))
    (said,) = {order.reason for _, order in world.orders if isinstance(order, StopRanks)}
    world.leave("n1")
    world.back("n0")
    world.tick(20)
    assert world.doc.reason.startswith("waits up to 600 s for round 2")
    (reply,) = world.join("n2", running=world.order("n2"), running_state="stopping", known_round=1)
    assert isinstance(reply.order, StopRanks)
    assert reply.order.reason == said


@pytest.mark.parametrize(
    "control", [JobControl(is_braked=True), JobControl(modes={"restart": "observe"})]
)
def test_the_brake_keeps_a_round_that_could_be_larger(control: JobControl) -> None:
    world = World(spec(1, nodes_max=2), grow_after_s=5, elastic_wait_s=0).started("n0")
    world.control = control
    world.join("n1")
    world.tick(6)
    assert world.doc.phase == "running"
    world.control = JobControl()
    world.tick(1)
    assert world.doc.planned is None
    world.tick(5)
    assert world.doc.planned is not None


def test_a_world_in_units_never_has_half_of_one() -> None:
    world = World(spec(2, nodes_max=6, slots_per_unit=2), elastic_wait_s=5)
    world.join(*names(5))
    world.tick(6)
    assert len(world.members()) == 4


def test_an_agent_that_leaves_ends_the_round_and_is_on_record() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.leave("n1")
    assert world.doc.phase == "ending"
    assert [fact.cause for fact in world.of(NodeLeft)] == ["operator"]


def test_the_largest_fleet_is_decided_about_in_milliseconds_and_fits_when_compressed() -> None:
    count = 12_500
    world = World(spec(count))
    nodes = [f"worker-gpu-{number:05}.cluster-a".replace(".", "-") for number in range(count)]
    world.join(*nodes[:-1])
    began = time.thread_time()
    world.join(nodes[-1])
    stored = msgspec.json.encode(world.doc)
    took_s = time.thread_time() - began
    assert len(packed(stored, "j")) < 512 * 1024
    assert msgspec.json.decode(stored, type=RoundDocument) == world.doc
    assert took_s < 5  # with room for a slow machine: about 0.3 s, 12 500 orders included
    assert [seat.slot for seat in world.doc.seats] == list(range(count))


def test_nodes_that_had_a_seat_are_remembered_also_when_the_job_is_over() -> None:
    """Facts about them may be read late."""
    world = World(spec(2)).started("n0", "n1", "n2")
    world.leave("n2")
    world.gone("n1")
    world.take_over()
    assert world.doc.nodes == {"n0", "n1", "n2"}
    world.back("n0")
    world.join("n3")
    assert (set(world.members()), world.doc.former) == ({"n0", "n3"}, ("n2", "n1"))
    world.join("n2")
    assert world.doc.former == ("n1",)
    for node in ("n0", "n3", "n2"):
        world.leave(node)
    assert not world.doc.seats
    assert world.doc.nodes == {"n0", "n1", "n2", "n3"}


def test_of_those_that_come_and_go_the_newest_are_remembered() -> None:
    world = World(spec(1)).started("n0")
    for number in range(1100):
        world.join(f"spare-{number}")
        world.leave(f"spare-{number}")
    assert (len(world.doc.former), world.doc.former[-1]) == (1024, "spare-1099")
