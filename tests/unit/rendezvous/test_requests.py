"""What people may ask of rendezvous: the answer, and what is on record."""

import msgspec
import pytest

from everstep.messages import (
    CollectEvidence,
    Done,
    DrainNode,
    JobEnded,
    LeaveJob,
    OperatorActed,
    ReleaseImages,
    RequestChecks,
    RequestEvidence,
    RequestRelease,
    RequestSave,
    RestartJob,
    RoundEnded,
    RunChecks,
    SaveCheckpoint,
    StopJob,
)
from everstep_services.rendezvous.domain.events import Event, JobControl
from tests.unit.rendezvous.world import World, spec


def asked(world: World, question: Event) -> Done:
    reply = world.apply(question).replies[0]
    assert isinstance(reply, Done)
    return reply


def stop(**fields: bool) -> StopJob:
    return StopJob(job="j", by="ann", reason="enough", origin="cli", **fields)


def restart(*without_nodes: str) -> RestartJob:
    """Of the first round."""
    return RestartJob(job="j", by="ann", reason="stuck", round=1, without_nodes=without_nodes)


def drain(node: str, within_s: float | None = None) -> DrainNode:
    return DrainNode(job="j", by="ann", reason="fan", node=node, within_s=within_s)


def test_a_stop_says_how_long_there_is_to_save_and_what_agents_exit_with() -> None:
    world = World(spec(1), save_within_s=7.0).started("n0")
    done = asked(world, stop())
    assert not done.is_refused
    assert done.text == (
        "round 1 has 7 s to save, then ends; the job is stopped, and its agents exit with 93"
    )
    assert [type(order) for _, order in world.orders[-1:]] == [SaveCheckpoint]
    assert world.doc.phase == "running"
    done = asked(world, stop(save_first=False))
    assert done.text == "round 1 ends; the job is stopped, and its agents exit with 93"
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 93)


def test_a_stop_says_that_ranks_stand_still_and_would_not_save() -> None:
    world = World(spec(1), save_within_s=7.0).started("n0")
    world.control = JobControl(is_braked=True)
    for rank in (0, 1):
        world.report("n0", "rank_stalled", rank=rank, reason=f"rank {rank} has stalled")
    assert asked(world, stop()).text.startswith(
        "round 1 has 7 s to save, then ends; standing still: rank 0, 1; without a save it ends at "
    )


def test_a_job_that_waits_for_nodes_is_stopped_at_once() -> None:
    world = World(spec(2))
    world.join("n0")
    assert asked(world, stop()).text.startswith("no round runs; the job is stopped")
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 93)


def test_a_job_that_gave_up_is_closed_by_a_person() -> None:
    """A11.2: its last allocation has ended, and another one would continue it until then."""
    world = World(spec(2), join_within_s=60)
    world.join("n0")
    world.tick(61)
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 92)
    assert not world.of(JobEnded)
    assert asked(world, stop()).text.startswith("no round runs; the job is stopped")
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 93)
    (end,) = world.of(JobEnded)
    assert (end.state, end.reason) == ("stopped", "ann stopped the job: enough")
    assert asked(world, stop()).is_refused


def test_what_a_person_asked_for_is_on_record_with_who_why_and_which_way() -> None:
    world = World(spec(1)).started("n0")
    asked(world, stop(save_first=False))
    refused = asked(world, stop())
    assert refused.is_refused
    assert refused.text == "the job is over already: ann stopped the job: enough"
    acts = world.of(OperatorActed)
    assert {(act.by, act.action, act.origin) for act in acts} == {("ann", "stop_job", "cli")}
    assert [(act.outcome, act.reason) for act in acts] == [
        ("accepted", "enough"),
        ("refused", f"enough; {refused.text}"),
    ]


def test_all_agents_hear_which_images_are_released_while_there_are_any() -> None:
    world = World(spec(1)).started("n0")
    ask = RequestRelease(job="j", step=20, by="ann", reason="the data was bad")
    assert asked(world, ask).text == "all nodes are asked"
    to, order = world.orders[-1]
    assert isinstance(order, ReleaseImages)
    assert (to, order.round, order.step, order.by) == (None, 1, 20, "ann")
    asked(world, stop(save_first=False))
    done = asked(world, ask)
    assert (done.is_refused, done.text) == (
        True,
        "the job is over, and its states in memory are released",
    )


def test_a_restart_costs_nothing_and_says_so() -> None:
    world = World(spec(1, max_restarts=0)).started("n0")
    done = asked(world, restart())
    free = "another round follows, and does not count against the restart budget"
    assert done.text == f"round 1 ends; {free}"
    world.back("n0")
    world.run()
    assert (world.doc.phase, world.doc.round, world.doc.restarts) == ("running", 2, 0)
    assert [fact.cause for fact in world.of(RoundEnded)] == ["operator"]


def test_a_restart_of_a_round_that_is_over_is_refused() -> None:
    world = World(spec(1)).started("n0")
    asked(world, restart())
    done = asked(world, restart())
    assert done.is_refused
    assert done.text == "round 1 does not run: the job is at round 1, ending"


@pytest.mark.parametrize(
    "ask",
    [
        RestartJob(job="j", by="ann", reason="r", round=1, without_nodes=("n0", "ghost")),
        RequestChecks(job="j", nodes=("n0", "ghost"), by="ann", reason="r", origin="cli"),
        RequestEvidence(
            job="j", incident="c", evidence=("stacks",), within_s=5, nodes=("n0", "ghost"),
            by="ann", reason="r", origin="cli",
        ),
        DrainNode(job="j", node="ghost", by="ann", reason="r"),
    ],
)  # fmt: skip
def test_a_name_that_no_node_has_does_nothing(ask: Event) -> None:
    """It is a typing error, or a node that was replaced: nobody else pays for it."""
    world = World(spec(2)).started("n0", "n1")
    count = len(world.orders)
    done = asked(world, ask)
    assert (done.is_refused, done.text) == (True, "ghost takes no part in the job")
    assert (world.doc.phase, len(world.orders)) == ("running", count)
    assert [act.outcome for act in world.of(OperatorActed)] == ["refused"]


def test_a_request_of_a_job_that_waits_for_nodes_names_the_round_that_it_waits_for() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.gone("n1")
    world.report("n0", "stopped")
    world.tick(60.0)
    assert world.doc.phase == "joining"
    wanted = f"the job waits for the nodes of round {world.doc.round + 1}"
    assert asked(world, restart()).text == f"round 1 does not run: {wanted}"
    save = RequestSave(job="j", by="ann", reason="before the maintenance")
    assert asked(world, save).text == f"no round runs: {wanted}"


def test_a_restart_without_a_node_names_it() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join("n2")
    assert asked(world, restart("n1")).text.endswith(", without n1")
    world.back("n0", "n1")
    assert world.members() == ["n0", "n2"]
    assert world.of(OperatorActed)[0].target == "n1"


@pytest.mark.parametrize(
    ("spares", "left"),
    [
        (("n2",), "n1 leaves, and its agent exits with 0; the others continue without it"),
        ((), "n1 leaves, and its agent exits with 90; the job then needs another node"),
    ],
)
def test_a_drain_says_what_becomes_of_the_node_and_of_the_job(
    spares: tuple[str, ...], left: str
) -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join(*spares)
    assert asked(world, drain("n1")).text == f"round 1 ends; {left}"
    assert world.doc.phase == "ending"


def test_a_drain_gives_the_ranks_time_to_save_if_asked_to() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join("n2")
    assert asked(world, drain("n1", within_s=5)).text.startswith("round 1 has 5 s to save, then")
    assert isinstance(world.orders[-1][1], SaveCheckpoint)
    world.tick(4)
    assert world.doc.phase == "running"
    world.tick(1)
    assert world.doc.phase == "ending"


def test_a_spare_is_drained_without_a_word_to_the_others() -> None:
    world = World(spec(1)).started("n0")
    world.join("n1")
    text = "n1 leaves, and its agent exits with 0; the others continue without it"
    assert asked(world, drain("n1")).text == text
    assert world.doc.phase == "running"
    order = world.orders[-1][1]
    assert isinstance(order, LeaveJob)
    assert order.reason == "ann drains n1: fan; the others continue without it"


def test_a_node_that_takes_no_part_cannot_be_drained() -> None:
    world = World(spec(1)).started("n0")
    done = asked(world, drain("n9"))
    assert (done.is_refused, done.text) == (True, "n9 takes no part in the job")


def test_steps_that_were_made_before_a_restart_are_known_although_no_report_told_them() -> None:
    world = World(spec(1)).started("n0")
    asked(world, restart())
    world.back("n0", last_step=49)
    world.tick(1)
    assert (world.doc.round, world.order("n0").reached_step, world.doc.last_step) == (2, 49, 49)


def test_a_save_goes_to_a_round_that_runs_only() -> None:
    world = World(spec(1))
    world.join("n0")
    save = RequestSave(job="j", by="ann", reason="before the maintenance")
    done = asked(world, save)
    assert done.is_refused
    assert done.text == "no round runs: the job is at round 1, forming"
    world.run()
    done = asked(world, save)
    assert done.text == "the ranks of round 1 are asked to save after one of their next steps"
    order = world.orders[-1][1]
    assert isinstance(order, SaveCheckpoint)
    assert (order.reason, order.then_stop) == ("ann: before the maintenance", False)
    assert world.doc.phase == "running"


def test_checks_that_a_person_asks_for_are_ordered_and_on_record() -> None:
    world = World(spec(2)).started("n0", "n1")
    ask = RequestChecks(
        job="j", nodes=("n1",), by="ann", reason="slow", checks=("gpu",), origin="cli"
    )
    assert asked(world, ask).text == "asked 1 of 1 nodes"
    (order,) = [order for _, order in world.orders if isinstance(order, RunChecks)]
    assert (order.checks, order.reason) == (("gpu",), "ann: slow")
    refused = asked(world, msgspec.structs.replace(ask, nodes=("n9",)))
    assert (refused.is_refused, refused.text) == (True, "n9 takes no part in the job")
    acts = [(act.action, act.target, act.outcome) for act in world.of(OperatorActed)]
    assert acts == [("check_nodes", "n1", "accepted"), ("check_nodes", "n9", "refused")]


def test_checks_that_a_service_asks_for_are_its_own_to_explain() -> None:
    world = World(spec(1)).started("n0")
    ask = RequestChecks(job="j", nodes=("n0", "n9"), by="health", reason="suspect")
    assert asked(world, ask).text == "asked 1 of 2 nodes"
    assert list(world.of(OperatorActed)) == []


def test_a_capture_is_ordered_from_the_nodes_of_its_ranks_and_on_record() -> None:
    world = World(spec(2)).started("n0", "n1")
    ask = RequestEvidence(
        job="j", incident="capture-1", evidence=("stacks",), within_s=5, ranks=(1,),
        by="ann", reason="slow", origin="cli",
    )  # fmt: skip
    assert asked(world, ask).text == "asked 1 node of round 1"
    (order,) = [order for _, order in world.orders if isinstance(order, CollectEvidence)]
    assert (order.incident, order.ranks, order.reason) == ("capture-1", (1,), "ann: slow")
    assert asked(world, msgspec.structs.replace(ask, ranks=(99,))).is_refused
    over = asked(world, msgspec.structs.replace(ask, round=7))
    assert over.text == "round 7 is over: its ranks are gone"
    acts = [(act.action, act.outcome) for act in world.of(OperatorActed)]
    assert acts == [("capture", "accepted"), ("capture", "refused"), ("capture", "refused")]
    assert world.doc.phase == "running"


def test_evidence_that_a_service_asks_for_is_its_own_to_explain() -> None:
    world = World(spec(1)).started("n0")
    ask = RequestEvidence(job="j", incident="i", evidence=(), within_s=5, round=1)
    assert asked(world, ask).text == "asked 1 node of round 1"
    assert list(world.of(OperatorActed)) == []
