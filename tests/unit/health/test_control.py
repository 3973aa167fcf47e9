"""The switches, and who may not join."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from everstep.messages import CheckResult, Exclusion, NodesDocument
from everstep_services.health.nodes.control import (
    BadSwitchError,
    binds,
    blank,
    enforces_exclusions,
    reconciled,
    switched,
    value_of,
    with_exclusion,
    without_exclusion,
)
from everstep_services.health.nodes.register import NodeRegister, standings
from tests.unit.health.nodes import SETTINGS, Nodes, failed

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def exclusion(node: str, by: str, hours: float | None = 1) -> Exclusion:
    until = None if hours is None else NOW + timedelta(hours=hours)
    return Exclusion(node=node, by=by, reason="r", until=until)


def test_switches_are_changed_by_name_and_go_back_to_their_default() -> None:
    changes = {"brake": "on", "modes.exclude": "enforce", "catalog.keep_last": "5"}
    document = switched(blank(), changes, "ann", "storm")
    assert (document.is_braked, document.modes) == (True, {"exclude": "enforce"})
    assert document.settings == {"catalog.keep_last": "5"}
    assert (document.changed_by, document.reason) == ("ann", "storm")
    assert [value_of(document, name) for name in changes] == ["on", "enforce", "5"]
    document = switched(document, dict.fromkeys(changes, ""), "bob", "over")
    assert (document.is_braked, document.modes, document.settings) == (False, {}, {})
    assert switched(document, {"brake": "off"}, "eve", "again") == document, "it stood so already"


def test_the_brakes_reason_stays_until_it_is_let_go() -> None:
    document = switched(blank(), {"brake": "on"}, "ann", "storm")
    document = switched(document, {"catalog.keep_last": "5"}, "bob", "no reason given")
    assert (document.braked_by, document.brake_reason) == ("ann", "storm")
    assert (document.changed_by, document.reason) == ("bob", "no reason given")
    document = switched(document, {"brake": "off"}, "ann", "over")
    assert (document.braked_by, document.brake_reason) == ("", "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"brake": "yes"}, "brake cannot be 'yes': use one of 'on', 'off', ''"),
        ({"modes.exclude": "maybe"}, "cannot be 'maybe': use one of 'observe', 'enforce', ''"),
        ({"modes.frobnicate": "observe"}, "there is no switch 'modes.frobnicate': use brake"),
        ({"frobnicator.enabled": "true"}, "there is no switch 'frobnicator.enabled'"),
        ({"": "on"}, "there is no switch ''"),
        ({"catalog.keep_last": "abc"}, "catalog.keep_last cannot be 'abc': use a whole number"),
        ({"catalog.keep_last": "-1"}, "catalog.keep_last cannot be '-1': use a whole number"),
        ({"straggler.timings": "yes"}, "straggler.timings cannot be 'yes': use one of 'on', 'off'"),
        ({"straggler.cpu": "1"}, "straggler.cpu cannot be '1': use one of 'on', 'off', ''"),
        ({"straggler.window_s": "0"}, "use a number from 1 to 3600, or nothing"),
        ({"straggler.window_s": "inf"}, "straggler.window_s cannot be 'inf'"),
        ({"straggler.window_steps": "0"}, "use a whole number from 1 to 1000000, or nothing"),
        ({"straggler.window_steps": "1.5"}, "straggler.window_steps cannot be '1.5'"),
        ({"straggler.slower_ratio": "0.001"}, "use a number from 0.005 to 10, or nothing"),
        ({"straggler.slower_ratio": "1e1"}, "straggler.slower_ratio cannot be '1e1'"),
        ({"straggler.stop_below": "1"}, "use a number from 0.05 to 0.95, or nothing"),
        ({"straggler.stop_reports": "٣"}, "use a whole number from 1 to 10000, or nothing"),
        ({"straggler.exclude_after_s": "0"}, "use a number from 1 to 2592000, or nothing"),
        ({"straggler.exclude_causes": "design"}, "use some of host,device,network,compute,unknown"),
        ({"straggler.frobnicate": "on"}, "there is no switch 'straggler.frobnicate'"),
        ({"health.strikes_limit": "5"}, "a service reads other settings when it starts"),
    ],
)
def test_what_is_no_switch_is_refused_with_what_there_is(
    changes: dict[str, str], said: str
) -> None:
    with pytest.raises(BadSwitchError, match=said):
        switched(blank(), changes, "ann", "r")


def test_how_slow_ranks_are_sought_is_changed_while_it_runs() -> None:
    """On, off, window and thresholds are switches (A6.5)."""
    changes = {
        "straggler.timings": "off",
        "straggler.cpu": "on",
        "straggler.window_s": "2.5",
        "straggler.window_steps": "64",
        "straggler.slower_ratio": "0.05",
        "straggler.stop_below": "0.7",
        "straggler.stop_reports": "3",
        "straggler.exclude_after_s": "600",
        "straggler.exclude_confidence": "0.9",
        "straggler.exclude_causes": "host,compute",
    }
    document = switched(blank(), changes, "ann", "r")
    assert document.settings == changes
    assert switched(document, dict.fromkeys(changes, ""), "ann", "r").settings == {}


def test_a_setting_that_nothing_follows_any_more_can_be_taken_away() -> None:
    document = replace(blank(), settings={"health.strikes_limit": "5"})
    assert switched(document, {"health.strikes_limit": ""}, "ann", "r").settings == {}


def test_the_brake_stops_health_and_people_alike() -> None:
    """Exclusions of health and of people are only observed (A15.4)."""
    document = switched(blank(), {"modes.exclude": "enforce"}, "ann", "r")
    assert (enforces_exclusions(blank()), binds(blank())) == (False, True)
    assert (enforces_exclusions(document), binds(document)) == (True, True)
    braked = switched(document, {"brake": "on"}, "ann", "r")
    assert (enforces_exclusions(braked), binds(braked)) == (False, False)
    observed = switched(blank(), {"modes.exclude": "observe"}, "ann", "r")
    assert (enforces_exclusions(observed), binds(observed)) == (False, False)


def test_a_node_is_excluded_once() -> None:
    document = with_exclusion(blank(), exclusion("n1", "ann"))
    document = with_exclusion(document, exclusion("n1", "bob", None))
    assert document.exclusions == (exclusion("n1", "bob", None),)
    included = without_exclusion(document, "n1", "bob", "repaired")
    assert included.exclusions == ()
    assert (included.changed_by, included.reason) == ("bob", "n1 is included: repaired")
    assert without_exclusion(included, "n1", "ann", "again") is included


def test_healths_exclusions_are_made_to_be_those_that_it_decided() -> None:
    document = blank()
    for one in (
        exclusion("theirs", "ann"),
        exclusion("for-ever", "ann", None),
        exclusion("over", "ann", -1),
        exclusion("stale", "health"),
    ):
        document = with_exclusion(document, one)
    ours = [exclusion("new", "health"), exclusion("theirs", "health")]
    after, over = reconciled(document, ours, NOW)
    assert [(one.node, one.by) for one in after.exclusions] == [
        ("theirs", "ann"),
        ("for-ever", "ann"),
        ("new", "health"),
    ]
    assert [one.node for one in over] == ["over"]
    assert reconciled(after, ours, NOW) == (after, [])


def test_standings_are_told_the_worst_first() -> None:
    world = Nodes()
    for _ in range(2):
        world.lost("struck")
    world.fail_for_long("bad")
    world.examined("well", CheckResult(check="nic", state="warning"))
    world.examined("shut", failed("gpu", "watch"))
    world.judge()
    heard = {"struck": (0.5, False), "gone": (9.0, True), "bad": (0.1, False)}
    found = standings(
        ["well", "nobody", "struck", "gone", "bad", "shut"],
        world.register,
        [exclusion("shut", "ann"), exclusion("well", "ann", -1)],
        heard,
        NOW,
    )
    assert [(one.node, one.state, one.strikes) for one in found] == [
        ("shut", "excluded", 0),
        ("gone", "lost", 0),
        ("bad", "suspect", 1),
        ("struck", "healthy", 2),
        ("well", "healthy", 0),
        ("nobody", "unknown", 0),
    ]
    assert found[0].reason == "by ann: r"
    assert found[2].failing[0].check == "gpu"


def test_health_that_knows_nothing_calls_every_node_unknown() -> None:
    """Without evidence a node is unknown (A10.4)."""
    nothing = NodeRegister(NodesDocument(), SETTINGS)
    (found,) = standings(["n1"], nothing, [], {}, NOW)
    assert found.state == "unknown"


def test_a_node_is_not_healthy_if_none_of_its_checks_has_a_result() -> None:
    world = Nodes()
    vague = [CheckResult(check=check, state="unknown") for check in ("gpu", "nic")]
    for results, state in ((vague, "unknown"), (vague[:1], "healthy")):
        world.examined("n1", *results)
        (found,) = standings(["n1"], world.register, [], {"n1": (0.5, False)}, NOW)
        assert found.state == state
