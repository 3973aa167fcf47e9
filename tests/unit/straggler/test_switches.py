"""Each switch that operators can set acts on how slow ranks are sought."""

from typing import Any

import pytest
from msgspec.structs import replace

from everstep.messages import ControlDocument
from everstep_services.health.nodes.control import SETTINGS, blank, switched
from everstep_services.straggler.domain.switches import StragglerSwitches, explained, in_force
from everstep_services.straggler.settings import StragglerSettings, defaults

EXAMPLES = {
    "straggler.timings": ("off", StragglerSwitches(is_on=False)),
    "straggler.cpu": ("off", StragglerSwitches(is_cpu_timed=False)),
    "straggler.window_s": ("2.5", StragglerSwitches(window_s=2.5)),
    "straggler.window_steps": ("64", StragglerSwitches(window_steps=64)),
    "straggler.slower_ratio": ("0.1", StragglerSwitches(slower_ratio=0.1)),
    "straggler.stop_below": ("0.5", StragglerSwitches(stop_below=0.5)),
    "straggler.stop_reports": ("3", StragglerSwitches(stop_reports=3)),
    "straggler.exclude_after_s": ("60", StragglerSwitches(exclude_after_s=60.0)),
    "straggler.exclude_confidence": ("0.9", StragglerSwitches(exclude_confidence=0.9)),
    "straggler.exclude_causes": (
        "host,compute",
        StragglerSwitches(exclude_causes=("host", "compute")),
    ),
}


def test_there_is_an_example_of_each_switch() -> None:
    assert set(EXAMPLES) == {name for name in SETTINGS if name.startswith("straggler.")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_switch_that_is_accepted_acts(name: str) -> None:
    """On, off, window and thresholds change without a restart (A6.5)."""
    value, wanted = EXAMPLES[name]
    document = switched(blank(), {name: value}, "ann", "r")
    assert in_force(StragglerSwitches(), document) == wanted
    assert (
        in_force(StragglerSwitches(), switched(document, {name: ""}, "ann", "r"))
        == StragglerSwitches()
    )


def test_without_switches_the_settings_hold() -> None:
    assert defaults(StragglerSettings()) == StragglerSwitches()
    settings = StragglerSettings(timings=False, window_s=3.0, stop_reports=7)
    default = defaults(settings)
    assert in_force(default, None, blank()) == default
    on = switched(blank(), {"straggler.timings": "on"}, "ann", "r")
    assert in_force(default, None, on).is_on


def test_a_job_goes_before_the_cluster() -> None:
    cluster = switched(blank(), {"straggler.window_s": "5", "straggler.cpu": "off"}, "ann", "r")
    job = switched(blank(), {"straggler.window_s": "7"}, "ann", "r")
    assert in_force(StragglerSwitches(), cluster, job) == StragglerSwitches(
        window_s=7.0, is_cpu_timed=False
    )


def modes(**changes: str) -> ControlDocument:
    return switched(blank(), {f"modes.{name}": one for name, one in changes.items()}, "ann", "r")


def test_everything_only_observes_until_somebody_enforces_it() -> None:
    assert (
        in_force(StragglerSwitches()).stop_mode
        == in_force(StragglerSwitches()).exclude_mode
        == "observe"
    )
    found = in_force(StragglerSwitches(), modes(stop="enforce"))
    assert (found.stop_mode, found.exclude_mode) == ("enforce", "observe")
    found = in_force(
        StragglerSwitches(), modes(stop="enforce", exclude="enforce"), modes(stop="observe")
    )
    assert (found.stop_mode, found.exclude_mode) == ("observe", "enforce")


@pytest.mark.parametrize("braked", ["cluster", "job"])
def test_the_brake_stops_both(braked: str) -> None:
    """The brake of the cluster, or of the job, leaves only observation (A15.4)."""
    enforce = modes(stop="enforce", exclude="enforce")
    brake = switched(blank(), {"brake": "on"}, "ann", "r")
    both = (replace(enforce, is_braked=True), None) if braked == "cluster" else (enforce, brake)
    found = in_force(StragglerSwitches(), *both)
    assert (found.stop_mode, found.exclude_mode) == ("observe", "observe")


@pytest.mark.parametrize("value", ["", "nonsense", "nan", "inf", "-1", "0", "1e99", "\0"])
def test_a_value_that_makes_no_sense_changes_nothing(value: str) -> None:
    document = replace(blank(), settings=dict.fromkeys(EXAMPLES, value), modes={"stop": value})
    assert in_force(StragglerSwitches(), document) == StragglerSwitches()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window_s": 0.0}, "window_s must be above 0, got 0"),
        ({"slower_ratio": -0.1}, "slower_ratio must be above 0, got -0.1"),
        ({"stop_below": 1.0}, "stop_below must be between 0 and 1, got 1"),
        ({"stop_reports": 0}, "stop_reports must be at least 1, got 0"),
        ({"report_ranks": 0}, "report_ranks must be at least 1, got 0"),
        ({"inbox_windows": 0}, "inbox_windows must be at least 1, got 0"),
        ({"exclude_after_s": 0.0}, "exclude_after_s must be above 0"),
        ({"exclude_confidence": 1.1}, "exclude_confidence must be above 0 and at most 1, got 1.1"),
        ({"exclude_causes": ("design",)}, "exclude_causes may be host, device, .* got design"),
        ({"tick_s": 0.0}, "tick_s must be above 0"),
        ({"report_every_s": -1.0}, "report_every_s must not be negative, got -1"),
        ({"window_steps": -1}, "window_steps must not be negative, got -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StragglerSettings(**changes)  # type: ignore[arg-type]


def sources(*arguments: Any) -> dict[str, tuple[str, str]]:
    return {one.name: (one.value, one.source) for one in explained(*arguments)}


def test_each_switch_is_shown_with_its_value_and_where_that_is_from() -> None:
    settings = defaults(StragglerSettings(window_s=3.0, timings=False))
    cluster = switched(blank(), {"straggler.cpu": "off", "straggler.stop_reports": "10"}, "a", "r")
    job = switched(blank(), {"straggler.slower_ratio": "0.1", "modes.stop": "enforce"}, "a", "r")
    found = sources(settings, cluster, job)
    assert set(found) == {*EXAMPLES, "modes.stop", "modes.exclude"}
    assert found["straggler.window_s"] == ("3", "settings")
    assert found["straggler.timings"] == ("off", "settings")
    assert found["straggler.cpu"] == ("off", "control")
    assert found["straggler.stop_reports"] == ("10", "control"), "set, if to the default"
    assert found["straggler.slower_ratio"] == ("0.1", "control of the job")
    assert found["modes.stop"] == ("enforce", "control of the job")
    assert found["straggler.exclude_causes"] == ("host,device,network", "default")
    braked = switched(cluster, {"brake": "on"}, "ann", "r")
    assert sources(settings, braked, job)["modes.stop"] == ("observe", "brake")
    absurd = replace(cluster, settings={"straggler.window_s": "soon"})
    assert sources(settings, absurd, None)["straggler.window_s"] == ("3", "settings")


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_shown_is_what_was_set(name: str) -> None:
    value, _ = EXAMPLES[name]
    cluster = switched(blank(), {name: value}, "ann", "r")
    assert sources(StragglerSwitches(), cluster, None)[name] == (value, "control")
    assert sources(StragglerSwitches(), None, cluster)[name] == (value, "control of the job")
    assert sources(StragglerSwitches(), None, None)[name][1] == "default"
