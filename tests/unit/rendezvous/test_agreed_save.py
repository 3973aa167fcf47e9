"""A save of all ranks after the same step: before nodes are taken away, or because people ask."""

import pytest

from everstep.messages import (
    AllocationEnded,
    DrainNode,
    IncidentClosed,
    JobEnded,
    LeaveJob,
    PreemptionPlanned,
    RequestSave,
    RoundEnded,
    SaveCheckpoint,
    StartRanks,
    StopJob,
    StopRanks,
)
from tests.unit.rendezvous.world import World, spec


def running(*nodes: str, slots: int = 2, **fields: int) -> World:
    world = World(spec(slots, **fields), save_agree_s=0.5, save_lead_s=1.5)
    world.started(*nodes)
    world.tick(60)
    return world


def reach(world: World, node: str, step: int | None, step_s: float | None = 1.0) -> None:
    world.report(node, "reached", step=step, step_s=step_s, last_progress_age_s=0.0)


def saves(world: World) -> list[SaveCheckpoint]:
    return [order for _, order in world.orders if isinstance(order, SaveCheckpoint)]


def preempt(world: World, *nodes: str, grace_s: float = 600.0) -> None:
    for node in nodes:
        world.report(node, "preempted", grace_s=grace_s)


def test_the_step_is_one_that_no_rank_can_have_finished_before_the_order_is_there() -> None:
    world = running("n0", "n1")
    preempt(world, "n0")
    assert [(order.after_step, order.then_stop) for order in saves(world)] == [(None, True)]
    reach(world, "n0", 100)
    reach(world, "n1", 101)
    order = saves(world)[-1]
    # two seconds and a quarter of that, at one step a second, and then one more
    assert (order.after_step, order.then_stop) == (101 + 2 + 1, True)
    assert (order.occasion, order.within_s) == ("preemption", 600.0)


def test_long_steps_count_from_the_last_one_on() -> None:
    world = running("n0", "n1")
    preempt(world, "n0")
    for node, age_s in (("n0", 10.0), ("n1", 58.0)):
        world.report(node, "reached", step=7, step_s=60.0, last_progress_age_s=age_s)
    assert saves(world)[-1].after_step == 7 + 1 + 1


def test_who_does_not_answer_is_not_waited_for() -> None:
    world = running("n0", "n1")
    preempt(world, "n0")
    reach(world, "n0", 10)
    world.tick(0.4)
    assert saves(world)[-1].after_step is None
    world.tick(0.2)
    assert saves(world)[-1].after_step == 13


def test_who_counts_steps_only_after_the_step_was_settled_has_all_asked_again() -> None:
    """A notice before any session is open: each node by itself would name another step (A12.1)."""
    world = running("n0", "n1")
    preempt(world, "n0")
    reach(world, "n0", None)
    reach(world, "n1", None)
    assert saves(world)[-1].after_step == 0
    reach(world, "n1", None)
    world.tick(0.6)
    assert saves(world)[-1].after_step == 0, "still nobody does"
    reach(world, "n0", 1)
    world.tick(0.4)
    assert saves(world)[-1].after_step is None
    reach(world, "n1", 3)
    assert saves(world)[-1].after_step == 3 + 2 + 1
    reach(world, "n0", 4)
    assert saves(world)[-1].after_step == 3 + 2 + 1, "that is settled"


def test_orders_are_repeated_for_one_may_be_lost_and_the_step_stays() -> None:
    world = running("n0", "n1")
    preempt(world, "n0")
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    reach(world, "n1", 99)
    world.tick(10)
    assert {order.after_step for order in saves(world)} == {None, 13}
    assert sum(order.after_step == 13 for order in saves(world)) > 10


def test_without_a_spare_all_save_and_the_allocation_ends_preempted() -> None:
    world = running("n0", "n1")
    preempt(world, "n0")
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    assert saves(world)[-1].then_leave
    (planned,) = world.of(PreemptionPlanned)
    assert (planned.plan, planned.stop_after_step, planned.nodes) == ("save_and_exit", 13, ("n0",))
    assert planned.reason.startswith("n0: n0 preempted; "), "its agent speaks of `this node`"
    world.leave("n0", "preempted", exit_code=91)
    assert world.doc.phase == "running", "n1 still saves"
    assert not any(isinstance(order, StopRanks) for _, order in world.orders)
    world.leave("n1", "preempted", exit_code=91)
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 91)
    assert [ended.cause for ended in world.of(RoundEnded)] == ["preempted"]
    assert [(it.state, it.exit_code) for it in world.of(AllocationEnded)] == [("preempted", 91)]
    assert world.of(JobEnded) == []


def test_a_spare_that_is_not_enough_is_sent_away_with_the_others() -> None:
    world = running("n0", "n1", "n2")
    preempt(world, "n0", "n1")
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    world.leave("n0", "preempted", exit_code=91)
    world.leave("n1", "preempted", exit_code=91)
    (order,) = [order for _, order in world.orders if isinstance(order, LeaveJob)]
    assert order.exit_code == 91


def test_with_a_spare_all_save_and_it_takes_the_slot() -> None:
    world = running("n0", "n1", "n2")
    preempt(world, "n1")
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    order = saves(world)[-1]
    assert (order.after_step, order.then_stop, order.then_leave) == (13, True, False)
    world.leave("n1", "preempted", exit_code=91)
    assert world.doc.phase == "running", "n0 still saves"
    world.report("n0", "stopped")
    assert world.doc.phase == "ending"
    assert [ended.cause for ended in world.of(RoundEnded)] == ["preempted"]
    world.back("n0")
    assert world.members() == ["n0", "n2"]
    assert world.doc.restarts == 0
    world.run()
    assert [(it.trigger, it.outcome) for it in world.of(IncidentClosed)] == [
        ("preempted", "recovered")
    ]


def test_a_node_that_goes_without_having_saved_ends_the_round_for_the_others() -> None:
    world = running("n0", "n1", "n2")
    preempt(world, "n1")
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    world.leave("n1", "preempted", exit_code=143)
    assert world.doc.phase == "ending"


def test_nobody_waits_for_the_others_longer_than_the_grace() -> None:
    world = running("n0", "n1", "n2")
    preempt(world, "n1", grace_s=30)
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    world.leave("n1", "preempted", exit_code=91)
    world.tick(29)
    assert world.doc.phase == "running"
    world.tick(2)
    assert world.doc.phase == "ending"


def test_a_second_node_that_goes_changes_the_plan() -> None:
    world = running("n0", "n1", "n2")
    for node in ("n0", "n1"):
        preempt(world, node)
        reach(world, "n0", 10)
        reach(world, "n1", 10)
    assert [it.plan for it in world.of(PreemptionPlanned)] == ["replace", "save_and_exit"]
    assert saves(world)[-1].after_step == 13
    assert saves(world)[-1].then_leave
    world.tick(700)
    assert world.doc.phase == "running", "each node has a grace of its own"


def test_an_elastic_job_shrinks() -> None:
    world = World(spec(1, nodes_max=2)).started("n0", "n1")
    preempt(world, "n1")
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    assert [it.plan for it in world.of(PreemptionPlanned)] == ["shrink"]


def test_where_the_sdk_counts_no_steps_the_node_that_goes_ends_the_round() -> None:
    world = running("n0", "n1", "n2")
    preempt(world, "n1")
    reach(world, "n0", None)
    reach(world, "n1", None)
    assert world.of(PreemptionPlanned)[0].stop_after_step is None
    assert world.doc.saving is None
    world.leave("n1", "preempted", exit_code=91)
    assert world.doc.phase == "ending"


def test_where_the_sdk_counts_no_steps_a_whole_job_goes_at_once() -> None:
    world = running("n0", "n1")
    preempt(world, "n1")
    reach(world, "n0", None)
    reach(world, "n1", None)
    assert (saves(world)[-1].after_step, saves(world)[-1].then_leave) == (0, True)


def test_a_training_that_comes_to_its_good_end_all_the_same_is_done() -> None:
    world = running("n0", "n1", "n2")
    preempt(world, "n1")
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    world.report("n0", "finished")
    world.report("n1", "finished")
    assert world.doc.phase == "done"


def test_ranks_that_have_stopped_for_a_reason_that_nobody_knows_have_not_finished() -> None:
    world = running("n0", "n1")
    world.report("n0", "stopped")
    assert (world.doc.phase, world.doc.exit_code) == ("ending", None)


@pytest.mark.parametrize("saves_in", [0.0, 5.0])
def test_a_stop_waits_until_all_have_saved_and_no_longer(saves_in: float) -> None:
    world = running("n0", "n1")
    world.apply(StopJob(job="j", by="ann", reason="enough", save_first=True))
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    assert (saves(world)[-1].after_step, saves(world)[-1].then_stop) == (13, True)
    world.tick(saves_in)
    world.report("n0", "stopped")
    assert world.doc.phase == "running"
    world.report("n1", "stopped")
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 93)


def test_a_stop_waits_for_nothing_where_nobody_can_be_told_to_save() -> None:
    world = running("n0", "n1")
    world.apply(StopJob(job="j", by="ann", reason="enough", save_first=True))
    reach(world, "n0", None)
    reach(world, "n1", None)
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 93)


def test_a_drain_with_time_saves_at_the_same_step_and_then_replaces() -> None:
    world = running("n0", "n1", "n2")
    world.apply(DrainNode(job="j", by="ann", reason="fan", node="n1", within_s=60))
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    world.report("n0", "stopped")
    world.report("n1", "stopped")
    world.back("n0", "n1")
    assert world.members() == ["n0", "n2"]


def test_a_save_goes_on_and_is_not_repeated_for_ever() -> None:
    world = running("n0", "n1")
    world.apply(RequestSave(job="j", by="ann", reason="before the maintenance"))
    reach(world, "n0", 10)
    reach(world, "n1", 10)
    world.tick(60)
    assert (world.doc.phase, world.doc.saving) == ("running", None)
    assert (saves(world)[-1].after_step, saves(world)[-1].then_stop) == (13, False)
    count = len(saves(world))
    world.tick(60)
    assert len(saves(world)) == count


def test_a_round_that_fails_while_it_saves_takes_no_save_to_the_next() -> None:
    world = running("n0", "n1")
    world.apply(RequestSave(job="j", by="ann", reason="now"))
    world.report("n0", "rank_exited", rank=0, exit_code=1)
    world.back("n0", "n1")
    assert world.doc.round == 2
    assert world.doc.saving is None
    assert isinstance(world.orders[-1][1], StartRanks)


def test_a_round_saves_before_it_grows() -> None:
    """Nothing has failed: no step since the last save is to be made again."""
    world = World(spec(1, nodes_max=2), grow_after_s=5, elastic_wait_s=0, save_agree_s=0.5)
    world.started("n0")
    world.join("n1")
    world.tick(6)
    assert world.doc.phase == "running"
    reach(world, "n0", 100)
    assert (saves(world)[-1].after_step, saves(world)[-1].then_stop) == (103, True)
    world.report("n0", "stopped")
    (ended,) = world.of(RoundEnded)
    assert ended.cause == "grow"
    world.back("n0")
    assert world.members() == ["n0", "n1"]


def test_a_round_whose_steps_nobody_counts_grows_at_once() -> None:
    world = World(spec(1, nodes_max=2), grow_after_s=5, elastic_wait_s=0, save_agree_s=0.5)
    world.started("n0")
    world.join("n1")
    world.tick(6)
    reach(world, "n0", None)
    assert [ended.cause for ended in world.of(RoundEnded)] == ["grow"]
