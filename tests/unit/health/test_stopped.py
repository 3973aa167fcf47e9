"""An agent that is stopped while its ranks and its warden live: no reason for a restart.

A15.2: what is unreachable is not failed.
"""

import pytest

from tests.unit.health.fleet import SETTINGS, World, first_loss


def standing(nodes: int = 3) -> World:
    """Nodes of a round that starts, loads, compiles or evaluates: nobody steps."""
    world = World(nodes, slots=nodes)
    world.run(10)
    world.is_moving = False
    world.run(20)
    return world


@pytest.mark.parametrize("seconds", [3.0, 10.0, 25.0])
def test_a_stopped_agent_whose_warden_answers_is_not_lost(seconds: float) -> None:
    world = standing()
    world.stopped = {"n1"}
    world.run(seconds)
    world.stopped = set()
    world.run(60)
    assert world.found == []
    assert 0 < world.inquiries < 6 * seconds


def test_before_any_step_was_seen_it_is_not_lost_either() -> None:
    world = World(3, slots=3)
    world.is_moving, world.moved_at, world.step_s = False, 0.0, 1e9
    world.run(10)
    world.stopped = {"n2"}
    world.run(20)
    assert world.found == []


def test_a_stopped_agent_is_lost_in_the_end() -> None:
    world = standing()
    world.stopped, began = {"n1"}, world.now
    world.run(60)
    assert world.lost == ["n1"]
    took_s = world.found[0][0] - began
    assert SETTINGS.stopped_limit_s - 1.1 <= took_s <= SETTINGS.stopped_limit_s + 0.2
    assert "its warden answers: health has waited for its stopped agent" in first_loss(world).reason
    assert first_loss(world).is_warden_alive


def test_while_others_train_on_a_stopped_agent_is_nobodys_loss() -> None:
    world = World(3, slots=3)
    world.run(10)
    world.stopped = {"n1"}
    world.run(600)
    assert world.found == []
    assert world.inquiries == 0


@pytest.mark.parametrize("how", ["silent", "killed"])
def test_a_dead_node_is_found_as_soon_as_ever(how: str) -> None:
    world = standing()
    setattr(world, how, {"n1"})
    began = world.now
    world.run(10)
    assert world.lost == ["n1"]
    assert world.found[0][0] - began <= SETTINGS.hailed_limit_s + 1


def test_who_dies_while_it_is_stopped_is_found_soon() -> None:
    world = standing()
    world.stopped = {"n1"}
    world.run(10)
    world.stopped, world.silent = set(), {"n1"}
    began = world.now
    world.run(10)
    assert world.lost == ["n1"]
    assert world.found[0][0] - began <= 1.5
    assert not first_loss(world).is_warden_alive


@pytest.mark.parametrize("state", ["stopping", "joining"])
def test_once_its_round_is_over_a_stopped_agent_is_not_waited_for(state: str) -> None:
    world = standing()
    world.stopped = {"n1"}
    world.run(5)
    assert world.lost == []
    world.state = state
    world.run(2)
    assert world.lost == ["n1"]


def test_a_stopped_spare_is_not_waited_for() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.is_moving = False
    world.stopped = {"n3"}
    world.run(10)
    assert world.lost == ["n3"]


def test_nobody_vouches_for_itself_and_nobody_is_there_to_ask() -> None:
    world = World(1, slots=1)
    world.run(10)
    world.stopped = {"n0"}
    world.run(SETTINGS.all_cut_off_limit_s + 2)
    assert (world.lost, world.inquiries) == (["n0"], 0)
