"""The brake: each automatic action that a switch allows only observes while it is on."""

from collections.abc import Callable

import pytest

from everstep.messages import ControlDocument
from everstep.messages.documents.health import combined
from everstep_services.attribution.domain import policy
from everstep_services.health.nodes.control import (
    ACTUATORS,
    binds,
    blank,
    enforces_exclusions,
    switched,
)
from everstep_services.rendezvous.domain.events import JobControl
from everstep_services.straggler.domain import switches as straggler

_RULES = policy.PolicySwitches(user_errors="enforce", repeat_offenders="enforce")


def _actuator(name: str) -> Callable[[ControlDocument], bool]:
    def acts(control: ControlDocument) -> bool:
        of_job = JobControl(is_braked=control.is_braked, modes=control.modes)
        return of_job.enforces(name, otherwise=True)

    return acts


ACTIONS: dict[str, Callable[[ControlDocument], bool]] = {
    **{f"rendezvous: {name}": _actuator(name) for name in ACTUATORS},
    "rendezvous: avoid a suspect node": lambda control: (
        JobControl(control.is_braked, control.modes, suspects={"n1": "it failed"}).suspicion("n1")
        is not None
    ),
    "health excludes": enforces_exclusions,
    "exclusions by people bind": binds,
    "a slow rank stops its job": lambda control: (
        straggler.in_force(straggler.StragglerSwitches(), control).stop_mode == "enforce"
    ),
    "a slow rank excludes its node": lambda control: (
        straggler.in_force(straggler.StragglerSwitches(), control).exclude_mode == "enforce"
    ),
    "a verdict stops its job": lambda control: (
        policy.in_force(_RULES, control).user_errors == "enforce"
    ),
    "a verdict excludes a node": lambda control: (
        policy.in_force(_RULES, control).repeat_offenders == "enforce"
    ),
    "the catalog deletes": lambda control: not combined(control).is_braked,
}


@pytest.mark.parametrize("action", ACTIONS)
def test_under_the_brake_nothing_acts_that_acts_without_it(action: str) -> None:
    enforced = {f"modes.{name}": "enforce" for name in ACTUATORS}
    free = switched(blank(), enforced, "ann", "we trust it")
    assert ACTIONS[action](free)
    assert not ACTIONS[action](switched(free, {"brake": "on"}, "ann", "a storm of false alarms"))
