"""Agents that died while no replica of the control plane was there are found by probes."""

import pytest

from everstep.messages import NodeLost
from everstep_services.rendezvous.domain.events import Probed
from everstep_services.rendezvous.settings import RendezvousSettings
from tests.unit.rendezvous.world import World, spec

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
