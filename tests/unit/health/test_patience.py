"""The control planes that tests share are as patient as a machine needs that stalls."""

import pytest

from everstep.settings import load
from everstep_services.health.settings import HealthSettings
from tests.e2e.control_planes import PATIENT
from tests.unit.health.fleet import World

STALLS_FOR_S = 20.0


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.parametrize("silent", [{"n1"}, {"n0", "n1"}])
def test_no_node_is_lost_that_gets_no_turn_for_a_while(slots: int, silent: set[str]) -> None:
    """Nobody is seen to make steps; or they have made some, and stand."""
    settings = load({"health": HealthSettings}, environ=PATIENT).section(HealthSettings)
    world = World(2, slots=slots, settings=settings)
    world.run(5)
    world.is_moving = False
    world.run(3)
    world.silent = silent
    world.run(STALLS_FOR_S)
    assert world.found == []
