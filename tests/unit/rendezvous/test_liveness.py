"""Agents that died while no replica of the control plane was there are found by probes."""

import pytest

from everstep.messages import ActionDecided, IncidentOpened, NodeLost, RoundEnded
from everstep_services.rendezvous.domain.events import JobControl, Probed
from everstep_services.rendezvous.settings import RendezvousSettings
from tests.unit.rendezvous.world import WALL, World, spec

AFTER_S = RendezvousSettings().unheard_after_s


def probed(world: World) -> list[str]:
    """The agents that this replica has probed so far."""
    return sorted(world.memory.probed)


def test_a_replica_that_takes_a_round_over_probes_the_members_that_it_has_not_heard() -> None:
    """The first node and the control plane died together: a new allocation must not wait."""
    world = World(spec(2)).started("n0", "n1")
    world.take_over()
    world.join("n2")
    assert world.doc.phase == "running"
    world.report("n1", "stepping", step=9)
    world.tick(AFTER_S - 1)
    assert probed(world) == [], "agents may still reconnect"
    world.tick(1)
    assert probed(world) == ["n0-1"]
    world.gone("n0")
    world.back("n1")
    assert world.doc.phase == "forming"
    assert world.members() == ["n2", "n1"]


def test_a_member_that_answers_is_not_probed_again() -> None:
    world = World(spec(1)).started("n0")
    world.take_over()
    world.tick()
    world.tick(AFTER_S)
    assert probed(world) == ["n0-1"]
    world.apply(Probed("n0", "n0-1", is_there=True))
    asked_at = dict(world.memory.probed)
    world.tick(AFTER_S)
    assert world.memory.probed == asked_at
    assert world.doc.phase == "running"
    assert not world.of(NodeLost)


@pytest.mark.parametrize("taken_over", ["joining", "forming"])
def test_a_replica_that_saw_the_round_begin_probes_no_member(taken_over: str) -> None:
    world = World(spec(2))
    world.join("n0")
    if taken_over == "joining":
        world.take_over()
    world.join("n1")
    if taken_over == "forming":
        world.take_over()
    world.tick(0.05)
    world.run()
    world.tick(10 * AFTER_S)
    assert probed(world) == []


HELD = [JobControl(is_braked=True), JobControl(modes={"restart": "observe"})]


def silent(world: World, seconds: int, *, is_there: bool | None) -> None:
    """Health reminds of its finding once a second, and the server answers our probes."""
    for second in range(seconds):
        world.apply(lost(2.0 + second))
        if world.last.probes and is_there is not None:
            world.apply(Probed("n1", "n1-1", is_there=is_there))
        world.tick(1)


def lost(silence_s: float, *, is_warden_alive: bool = False) -> NodeLost:
    return NodeLost(
        id="f" * 32, job="j", at=WALL, source="health", round=1, node="n1", reason="n1 is silent",
        silence_s=silence_s, limit_s=1.75, is_warden_alive=is_warden_alive,
    )  # fmt: skip


@pytest.mark.parametrize("control", HELD)
@pytest.mark.parametrize("is_there", [True, None])
def test_silence_ends_no_round_while_the_brake_is_on(
    control: JobControl, is_there: bool | None
) -> None:
    """Its agent may only get no turn: a round in which all ranks live goes on."""
    world = World(spec(2)).started("n0", "n1")
    world.control = control
    world.tick(60)
    silent(world, 60, is_there=is_there)
    assert world.doc.phase == "running"
    (decided,) = world.of(ActionDecided)
    assert (decided.mode, decided.rule, decided.evidence) == (
        "observe", "restart.observe", ("f" * 32,)
    )  # fmt: skip
    world.control = JobControl()
    silent(world, 1, is_there=None)
    assert [ended.cause for ended in world.of(RoundEnded)] == ["node_lost"]


@pytest.mark.parametrize("control", HELD)
def test_a_node_whose_connection_stays_closed_is_gone_under_the_brake_too(
    control: JobControl,
) -> None:
    world = World(spec(2)).started("n0", "n1")
    world.control = control
    world.tick(60)
    silent(world, 8, is_there=False)
    silent(world, 1, is_there=True)  # it has reconnected
    silent(world, 8, is_there=False)
    assert world.doc.phase == "running"
    silent(world, 4, is_there=False)
    assert [ended.cause for ended in world.of(RoundEnded)] == ["node_lost"]


def test_the_brake_keeps_nobody_in_a_round_that_is_over() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.control = JobControl(is_braked=True)
    world.tick(60)
    world.report("n0", "rank_exited", rank=0, exit_code=1)
    world.tick(3)
    world.apply(lost(4.0))
    assert [seat.stage for seat in world.doc.seats if seat.node == "n1"] == ["gone"]


@pytest.mark.parametrize("is_warden_alive", [False, True])
def test_an_agent_that_was_stopped_before_explains_no_rank_that_was_killed_elsewhere(
    is_warden_alive: bool,
) -> None:
    """Without its warden, too, the node may have been lost first, and the rank be its victim."""
    world = World(spec(2)).started("n0", "n1")
    world.tick(60)
    world.report("n0", "rank_exited", rank=0, exit_code=-9)
    world.apply(lost(9.0, is_warden_alive=is_warden_alive))
    incident = world.doc.incident
    assert incident is not None
    assert (incident.trigger, incident.reports) == (
        "rank_exited" if is_warden_alive else "node_lost", 2
    )  # fmt: skip
    assert incident.lost == (() if is_warden_alive else ("n1",))
    assert [seat.stage for seat in world.doc.seats if seat.node == "n1"] == ["gone"]


def test_a_stopped_agent_that_health_has_given_up_ends_its_round() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.tick(60)
    world.apply(lost(30.0, is_warden_alive=True))
    assert [it.trigger for it in world.of(IncidentOpened)] == ["node_lost"]
