"""Orders that let ranks save first: what they survive until their round has ended.

A stop of the job survives everything; a node that was sent away stays away; another round follows
a restart, a drain or a growth, unless a stop or the preemption of too many nodes comes meanwhile.
"""

from collections.abc import Callable

import pytest

from everstep.messages import (
    ActionDecided,
    Done,
    DrainNode,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    LeaveJob,
    NodeLost,
    RestartJob,
    RoundEnded,
    StopJob,
    StopRanks,
)
from everstep_services.rendezvous.domain.events import Event
from tests.unit.rendezvous.world import WALL, World, spec

STOPPED, PREEMPTED, GOES_ON = "stopped 93", "stopped 91", "forming round 2"
Act = Callable[[World], object]


def asked(world: World, question: Event) -> Done:
    reply = world.apply(question).replies[0]
    assert isinstance(reply, Done)
    return reply


def stop(world: World, *, saves: bool = True) -> Done:
    return asked(world, StopJob(job="j", by="ann", reason="enough", save_first=saves))


def restart(world: World, *, saves: bool = True) -> Done:
    ask = RestartJob(job="j", by="bob", reason="stuck", round=1, save_first=saves)
    return asked(world, ask)


def drain(world: World, within_s: float | None = 30.0) -> Done:
    ask = DrainNode(job="j", by="bob", reason="fan", node="n1", within_s=within_s)
    return asked(world, ask)


def preempt(world: World, node: str = "n1") -> None:
    world.report(node, "preempted", grace_s=600.0)
    agree(world)


def agree(world: World) -> None:
    """All members report their step, if they are asked for it."""
    for node in world.members():
        world.report(node, "reached", step=10, step_s=1.0, last_progress_age_s=0.0)


def grow(world: World) -> None:
    """A node more than the round has slots for."""
    world.join("n3")
    world.tick(6)
    assert world.doc.planned is not None


def lose(world: World) -> None:
    world.gone("n0")


def silence(world: World) -> None:
    world.now += 20
    lost = NodeLost(
        id="1" * 32,
        job="j",
        at=WALL,
        source="health",
        node="n0",
        silence_s=20,
        limit_s=2,
        reason="-",
    )
    world.apply(lost)


def take_over_after_a_kill(world: World) -> None:
    world.report("n0", "rank_exited", rank=0)
    world.take_over()


def stall(world: World) -> None:
    world.report("n0", "rank_stalled", rank=0, waited_s=99.0)
    world.tick(5)


HAPPENINGS: dict[str, Act] = {
    "nothing": lambda world: None,
    "the time passes": lambda world: world.tick(700),
    "a rank is killed": lambda world: world.report("n0", "rank_exited", rank=0),
    "a rank is killed, then another replica decides": take_over_after_a_kill,
    "a rank raises": lambda world: world.report("n0", "rank_exited", rank=0, exit_code=1),
    "a rank asks for other nodes": lambda world: world.report(
        "n0", "rank_exited", rank=0, exit_code=16, asks="move"
    ),
    "a rank stalls": stall,
    "a node is lost": lose,
    "a node is silent": silence,
    "an agent leaves": lambda world: world.leave("n0", "operator", exit_code=130),
    "a node leaves before it has saved": lambda world: world.leave(
        "n0", "preempted", exit_code=143
    ),
    "another replica decides": lambda world: world.take_over(),
    "a restart": restart,
    "a restart without a save": lambda world: restart(world, saves=False),
    "a drain": drain,
    "a drain at once": lambda world: drain(world, None),
    "a preemption": preempt,
    "a stop": stop,
    "a stop without a save": lambda world: stop(world, saves=False),
}
ORDERS: dict[str, Act] = {"stop": stop, "restart": restart, "drain": drain, "preempt": preempt}


def settled(world: World) -> str:
    """What has become of the job, once its ranks have stopped and its agents are back."""
    if world.doc.phase == "running":
        for node in world.members():
            seat = next(seat for seat in world.doc.seats if seat.node == node)
            if seat.is_leaving and "preempted" in seat.leaves_because:
                world.leave(node, "preempted", exit_code=91)
            else:
                world.report(node, "stopped")
    if world.doc.phase == "ending":
        world.back(*(seat.node for seat in world.doc.seats if seat.stage == "stopping"))
    world.tick(20)
    if world.doc.phase == "stopped":
        return f"stopped {world.doc.exit_code}"
    return f"{world.doc.phase} round {world.doc.round}"


def ordered(order: str, *, spares: int) -> World:
    """A round of two slots that has an order to save, agreed on; with spares."""
    most = 3 if order == "grow" else 2
    world = World(spec(2, nodes_max=most), grow_after_s=5, elastic_wait_s=0, save_agree_s=0.5)
    nodes = [f"n{number}" for number in range(2 + spares)]
    world.started(*nodes)
    (ORDERS | {"grow": grow})[order](world)
    agree(world)
    assert world.doc.phase == "running"
    return world


@pytest.mark.parametrize("happening", HAPPENINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_with_spares_a_round_follows_every_order_but_a_stop(order: str, happening: str) -> None:
    world = ordered(order, spares=2)
    HAPPENINGS[happening](world)
    is_stop = "stop" in {order, *happening.split()}
    assert settled(world) == (STOPPED if is_stop else GOES_ON)
    assert len(world.of(JobEnded)) == is_stop
    if order in {"drain", "preempt"} and not is_stop:
        assert "n1" not in world.members(), "it was sent away"


@pytest.mark.parametrize("happening", HAPPENINGS)
def test_a_stop_holds_where_no_node_is_left_over(happening: str) -> None:
    world = ordered("stop", spares=0)
    HAPPENINGS[happening](world)
    assert settled(world) == STOPPED
    (ended,) = world.of(JobEnded)
    assert "ann stopped the job: enough" in ended.reason
    assert world.doc.restarts == 0


@pytest.mark.parametrize("order", ["restart", "preempt"])
@pytest.mark.parametrize(
    ("happening", "outcome"),
    [
        ("nothing", None),
        ("a restart", None),
        ("a drain", None),
        ("a preemption", PREEMPTED),
        ("a stop", STOPPED),
        ("a stop without a save", STOPPED),
    ],
)
def test_too_few_nodes_for_a_round_leave_together_unless_the_job_is_stopped(
    order: str, happening: str, outcome: str | None
) -> None:
    world = ordered(order, spares=0)
    HAPPENINGS[happening](world)
    alone = PREEMPTED if order == "preempt" else GOES_ON
    if (order, happening) == ("restart", "a drain"):
        alone = "joining round 1"  # it waits for another node
    assert settled(world) == (outcome or alone)


@pytest.mark.parametrize("happening", ["a rank is killed", "a drain", "a stop", "a preemption"])
def test_a_round_that_makes_room_for_more_nodes(happening: str) -> None:
    world = ordered("grow", spares=0)
    HAPPENINGS[happening](world)
    assert settled(world) == (STOPPED if happening == "a stop" else GOES_ON)


def test_all_agents_that_leave_before_the_save_leave_a_stopped_job() -> None:
    world = ordered("stop", spares=0)
    for node in ("n0", "n1"):
        world.leave(node, "operator", exit_code=130)
    assert (world.doc.phase, world.doc.exit_code) == ("stopped", 93)


def test_a_failure_before_a_stop_is_an_incident_that_the_stop_closes() -> None:
    world = ordered("stop", spares=2)
    world.report("n0", "rank_exited", rank=0, reason="rank 0 was ended by SIGKILL")
    assert settled(world) == STOPPED
    (opened,) = world.of(IncidentOpened)
    (closed,) = world.of(IncidentClosed)
    (decided,) = world.of(ActionDecided)
    (ended,) = world.of(RoundEnded)
    assert (opened.trigger, ended.cause) == ("rank_exited", "rank_exited")
    assert (closed.outcome, closed.cause) == ("stopped", "rank 0 was ended by SIGKILL")
    assert (decided.action, decided.rule) == ("stop", "stop.ordered")
    assert decided.reason == "rank 0 was ended by SIGKILL; ann stopped the job: enough"
    assert {order.exit_code for _, order in world.orders if isinstance(order, LeaveJob)} == {93}


def test_orders_after_a_stop_are_answered_by_it() -> None:
    world = ordered("stop", spares=2)
    refused = restart(world)
    assert refused.is_refused
    stops = "ann stopped the job: enough, and its agents exit with 93"
    assert refused.text == f"no round follows round 1: {stops}"
    assert drain(world).text == f"round 1 has 30 s to save, then ends; {stops}"


def test_the_shorter_time_holds() -> None:
    world = ordered("drain", spares=2)
    world.tick(20)
    assert restart(world).text.startswith("round 1 has 10 s to save, then ends; another round")
    world.tick(9)
    assert world.doc.phase == "running"
    world.tick(2)
    assert world.doc.phase == "ending"
    (ended,) = world.of(RoundEnded)
    assert ended.reason == "bob asked for another round: stuck"


def surviving(nodes_max: int, survives: int) -> World:
    world = World(spec(2, nodes_max=nodes_max), grow_after_s=5, elastic_wait_s=0)
    world.join("n1", "n2")
    for node in world.members():
        world.report(node, "started")
    world.report("n1", "first_step", step=1, survives=survives)
    return world


def stops(world: World) -> list[tuple[str, bool]]:
    orders = [order for _, order in world.orders if isinstance(order, StopRanks)]
    return [(order.cause, order.are_kept) for order in orders]


def test_ranks_that_survive_are_parked_when_the_round_grows() -> None:
    world = surviving(3, survives=1)
    world.join("n3")
    world.tick(6)
    assert [ended.cause for ended in world.of(RoundEnded)] == ["grow"]
    assert stops(world) == [("operator", True)]
    world.back("n1", "n2")
    assert (world.doc.phase, world.doc.slots, world.doc.are_kept) == ("forming", 3, False)


@pytest.mark.parametrize(("survives", "ends"), [(2, [("operator", True)]), (1, []), (0, [])])
def test_a_drained_node_is_replaced_without_a_save_where_its_state_has_replicas(
    survives: int, ends: list[tuple[str, bool]]
) -> None:
    world = surviving(2, survives)
    world.join("n3")
    drain(world)
    assert stops(world) == ends
    world.tick(31)
    assert len(stops(world)) == 1
    world.back("n1", "n2")
    assert world.members() == ["n3", "n2"]


def test_a_person_who_restarts_keeps_no_rank() -> None:
    world = surviving(2, survives=2)
    restart(world, saves=False)
    assert stops(world) == [("operator", False)]
