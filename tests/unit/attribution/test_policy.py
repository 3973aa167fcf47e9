"""What verdicts ask for: stop what came again, replace a node that did it again; else nothing."""

from datetime import timedelta
from typing import Any

import pytest

from everstep.messages import Case, CasesDocument, ControlDocument, PastIncident, VerdictReached
from everstep_services.attribution.domain.past import PastIncidents
from everstep_services.attribution.domain.policy import PolicySwitches, due, in_force
from tests.unit.history.facts import BEGAN, make

ON = PolicySwitches(user_errors="enforce", repeat_offenders="enforce")
BUG = {
    "cause": "user_code",
    "fingerprint": "f1",
    "culprit_nodes": (),
    "is_transient": None,
    "advice": "restart",
}
BROKEN = {"cause": "gpu", "fingerprint": "f2", "culprit_nodes": ("n1",)}


def verdict(**values: Any) -> VerdictReached:
    given = {"job": "j", "incident": "i9", "confidence": 0.9, "is_inconclusive": False}
    fact = make("verdict_reached", **{**given, **values})
    assert isinstance(fact, VerdictReached)
    return fact


def past(incident: str, hours: float = 1.0, **values: Any) -> PastIncident:
    at = BEGAN - timedelta(hours=hours)
    given = {"job": "j", "cause": "user_code", "fingerprint": "f1", "step": 10}
    return PastIncident(incident=incident, at=at, **{**given, **values})


def rules(*args: Any) -> list[str]:
    return [one.rule for one in due(*args)]


def test_the_same_bug_twice_without_progress_stops_the_job() -> None:
    """One confirming retry, then it stops (A4.5, A4.6)."""
    (found,) = due(verdict(**BUG), 10, [past("i8")], ON)
    assert (found.rule, found.action, found.mode) == ("stop.user_error", "stop", "enforce")
    assert found.evidence == ("i8",)
    assert "f1" in found.reason


@pytest.mark.parametrize(
    ("said", "step", "before"),
    [
        ({}, 10, []),
        ({}, 11, [past("i8")]),
        ({}, 10, [past("i8", fingerprint="other")]),
        ({}, 10, [past("i7"), past("i8", fingerprint="other")]),
        ({}, 10, [past("i8", job="other")]),
        ({}, 10, [past("i9")]),
        ({}, 10, [past("i9"), past("i10")]),
        ({"is_transient": True}, 10, [past("i8")]),
        ({"retry": "as_is"}, 10, [past("i8")]),
        ({"retry": "never"}, 10, [past("i8")]),
        ({"is_inconclusive": True}, 10, [past("i8")]),
        ({"confidence": 0.4}, 10, [past("i8")]),
        ({"cause": "framework"}, 10, [past("i8")]),
        ({"fingerprint": ""}, 10, [past("i8", fingerprint="")]),
    ],
)
def test_what_may_go_well_next_time_is_not_stopped(
    said: dict[str, Any], step: int, before: list[PastIncident]
) -> None:
    """The first time, after real progress, another failure, or no clear verdict (A4.6)."""
    assert rules(verdict(**{**BUG, **said}), step, before, ON) == []


def test_rounds_of_one_incident_that_fail_alike_are_enough() -> None:
    """A crash loop is one incident: its verdict says that it came again (A4.5)."""
    (found,) = due(verdict(**{**BUG, "advice": "stop"}), None, [], ON)
    assert (found.rule, found.evidence) == ("stop.user_error", ())
    assert rules(verdict(**{**BROKEN, "advice": "stop"}), None, [], ON) == []


def test_an_unknown_step_is_no_progress() -> None:
    assert rules(verdict(**BUG), None, [past("i8", step=None)], ON) == ["stop.user_error"]


def test_a_node_that_verdicts_name_again_is_replaced() -> None:
    """Whichever job it was of; not for what the script does, nor for what is long ago (A7.1)."""
    offence: dict[str, Any] = {"cause": "host", "nodes": ("n1",), "fingerprint": "x"}
    (found,) = due(verdict(**BROKEN), 10, [past("i8", job="other", **offence)], ON)
    assert (found.rule, found.node, found.action) == ("replace.repeat_offender", "n1", "replace")
    assert rules(verdict(**BROKEN), 10, [past("i8", hours=14 * 24 + 1, **offence)], ON) == []
    assert rules(verdict(**BROKEN), 10, [past("i8", **{**offence, "nodes": ("n2",)})], ON) == []
    assert rules(verdict(**BROKEN), 10, [past("i8", **{**offence, "cause": "data"})], ON) == []
    assert rules(verdict(**{**BROKEN, "cause": "framework"}), 1, [past("i8", **offence)], ON) == []


@pytest.mark.parametrize("retry", ["after_change", "never"])
def test_what_no_other_node_would_help_against_is_no_offence(retry: str) -> None:
    offence: dict[str, Any] = {"cause": "host", "nodes": ("n1",), "fingerprint": "x"}
    needs_change = verdict(**BROKEN, retry=retry, is_transient=False)
    assert rules(needs_change, 10, [past("i8", **offence)], ON) == []
    assert rules(verdict(**BROKEN), 10, [past("i8", **offence, retry=retry)], ON) == []
    broken = verdict(**BROKEN, retry="without_node")
    assert len(rules(broken, 10, [past("i8", **offence, retry="without_node")], ON)) == 1


def test_one_verdict_replaces_one_node_at_most() -> None:
    """The node with most offences; of equal ones the first."""
    both = verdict(**{**BROKEN, "culprit_nodes": ("n1", "n2")})
    first = past("i7", cause="host", nodes=("n1", "n2"))
    (found,) = due(both, 10, [first], ON)
    assert found.node == "n1"
    (found,) = due(both, 10, [first, past("i8", cause="host", nodes=("n2",))], ON)
    assert (found.node, found.evidence) == ("n2", ("i7", "i8"))


def control(**values: Any) -> ControlDocument:
    given = {"settings": {}, "modes": {}, "changed_by": "ann", "reason": "because"}
    return ControlDocument(**{**given, **values})


def test_each_rule_observes_until_it_is_switched_on() -> None:
    """By settings or at run time, for one job or all; the brake holds all (A4.6)."""
    on = control(settings={"attribution.user_errors": "enforce", "attribution.offences": "3"})
    assert in_force(PolicySwitches(), None, None) == PolicySwitches()
    found = in_force(PolicySwitches(), on, None)
    assert (found.user_errors, found.repeat_offenders, found.offences) == ("enforce", "observe", 3)
    off = control(settings={"attribution.user_errors": "observe"})
    assert in_force(ON, on, off).user_errors == "observe"
    assert in_force(ON, on, control(is_braked=True)).user_errors == "observe"
    held = in_force(ON, control(modes={"stop": "observe", "exclude": "observe"}))
    assert (held.user_errors, held.repeat_offenders) == ("observe", "observe")
    odd = control(settings={"attribution.offences": "many", "attribution.user_errors": "maybe"})
    assert in_force(PolicySwitches(), odd) == PolicySwitches()


def test_an_incident_that_is_judged_again_knows_nothing_of_later_ones() -> None:
    """Late evidence, or a new replica, would else find the second failure before the first."""
    history = PastIncidents(CasesDocument())
    for incident in ("i1", "i2", "i1"):
        history.take(verdict(**BUG, incident=incident), 10)
    assert [one.incident for one in history.past] == ["i1", "i2"]
    assert history.before(Case(job="j", incident="i1", round=1), ["f1"]) == ()
    (before,) = history.before(Case(job="j", incident="i2", round=2), ["f1"])
    assert before.incident == "i1"
