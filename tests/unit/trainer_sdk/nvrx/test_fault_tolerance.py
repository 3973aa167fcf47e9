"""An integration of NVRx's client works with ours; no call of it raises."""

import importlib
import inspect
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from trainer_sdk import layout, nvrx, rank_session, sdk_log
from trainer_sdk.nvrx import (
    FaultToleranceConfig,
    HeartbeatTimeouts,
    RankMonitorClient,
    SectionTimeouts,
    WorkloadAction,
    WorkloadControlRequest,
)
from trainer_sdk.testing import Watch, watched
from trainer_sdk.wire import Paused, Requested, Resumed

REQUIRED = inspect.Parameter.empty


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(sdk_log, "_printed", set())
    with watched() as watch:
        yield watch


@pytest.fixture
def client(watch: Watch) -> RankMonitorClient:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def opened(watch: Watch) -> tuple[str, ...]:
    (names,) = watch.open.values() or [()]
    return names


def test_the_calls_of_nvrxs_documentation_work(watch: Watch) -> None:
    client = RankMonitorClient()
    assert (client.hb_timeouts, client.section_timeouts, client.cfg) == (None, None, None)
    client.load_state_dict({"current_timeouts": {}})
    client.init_workload_monitoring()
    assert client.is_initialized
    client.start_section("setup")
    client.end_section("setup")
    for number in range(20):
        client.start_section("step")
        client.end_section("step")
        client.send_heartbeat()
        if number == 10:
            client.start_section("checkpointing")
            client.end_section("checkpointing")
            assert client.calculate_and_set_section_timeouts(
                selected_sections=["setup", "step", "checkpointing"], calc_out_of_section=True
            )
            assert client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
    state = json.loads(json.dumps(client.state_dict()))["current_timeouts"]
    assert state["heartbeat"]["were_calculated"]
    assert state["section"]["calculated_sections"] == ["checkpointing", "setup", "step"]
    client.shutdown_workload_monitoring()
    assert watch.step == 20
    assert {name: one.count for name, one in watch.sections.items()} == {
        "setup": 1,
        "step": 20,
        "checkpointing": 1,
    }
    assert watch.is_paused
    assert isinstance(watch.messages[-1], Paused)
    assert not watch.misuses


def test_steps_that_the_script_counts_are_not_counted_twice(
    watch: Watch, client: RankMonitorClient
) -> None:
    for number in range(1, 6):
        client.start_section("step")
        rank_session.session().step(number)
        client.end_section("step")
    assert (watch.step, watch.reading.steps) == (5, 5)


def test_sections_may_overlap(watch: Watch, client: RankMonitorClient) -> None:
    client.start_section("a")
    client.start_section("b")
    client.start_section("c")
    client.end_section("a")
    assert opened(watch) == ("b", "c")
    client.end_section("c")
    client.end_section("b")
    assert not watch.open
    assert not watch.misuses


def test_calls_that_nvrx_refuses_are_reported_once_and_ignored(
    watch: Watch, client: RankMonitorClient, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        client.start_section("a")
        client.start_section("a")
        assert opened(watch) == ("a",)
        client.end_section("a")
        client.end_section("a")
        client.end_section("unknown")
        client.init_workload_monitoring()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4
    assert all(line.startswith("everstep: ") for line in said)
    for _ in range(2):
        assert not client.calculate_and_set_section_timeouts(selected_sections=["never"])
        assert not client.calculate_and_set_hb_timeouts()
        assert not client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_nothing_happens_before_the_beginning_and_after_the_end(watch: Watch) -> None:
    client = RankMonitorClient()
    for _ in range(2):
        client.start_section("step")
        client.end_section("step")
        client.end_all_sections()
        client.send_heartbeat()
        assert not client.calculate_and_set_hb_timeouts()
        client.shutdown_workload_monitoring()
    assert (watch.step, len(watch.sections)) == (0, 0)
    client.init_workload_monitoring()
    client.start_section("step")
    client.shutdown_workload_monitoring()
    assert watch.reading.pauses == 1
    assert not watch.open
    client.init_workload_monitoring()
    assert watch.reading.pauses == 0
    assert isinstance(watch.messages[-1], Resumed)


def test_all_sections_can_be_ended(watch: Watch, client: RankMonitorClient) -> None:
    client.end_all_sections()
    client.start_section("step")
    client.start_section("a")
    client.end_all_sections()
    assert not watch.open
    assert not watch.misuses


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (WorkloadAction.Continue, None),
        (WorkloadAction.ExcludeThisNode, "exclude"),
        (WorkloadAction.ShutdownWorkload, "stop"),
    ],
)
def test_requests_are_passed_on(
    watch: Watch, client: RankMonitorClient, action: WorkloadAction, kind: str | None
) -> None:
    client.send_workload_control_request(WorkloadControlRequest(action, "why"))
    asked = [(one.kind, one.reason) for one in watch.messages if isinstance(one, Requested)]
    assert asked == ([(kind, "why")] if kind else [])


def test_limits_are_calculated_saved_and_loaded(watch: Watch, client: RankMonitorClient) -> None:
    """NVRx's rows 16 and 17: what was calculated replaces what was configured."""
    for _ in range(3):
        client.send_heartbeat()
        with_section(client, "step")
    assert client.calculate_and_set_hb_timeouts()
    assert client.calculate_and_set_section_timeouts(["step"], calc_out_of_section=True)
    beats, sections = client.hb_timeouts, client.section_timeouts
    assert beats is not None
    assert sections is not None
    assert beats.are_valid
    assert beats.were_calculated
    assert sections.are_valid
    assert sections.were_calculated
    saved = json.loads(json.dumps(client.state_dict()))

    before, after = RankMonitorClient(), RankMonitorClient()
    before.load_state_dict(saved)
    before.init_workload_monitoring()
    after.init_workload_monitoring()
    after.load_state_dict(saved)
    for loaded in (before, after):
        assert loaded.hb_timeouts == beats
        assert loaded.section_timeouts == sections
        assert json.loads(json.dumps(loaded.state_dict())) == saved


def test_limits_of_the_launcher_are_the_configuration(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"first-step": 600, "heartbeat": 30, "outside": 90, "step": 60, "setup": 5}
    monkeypatch.setenv(layout.LIMITS_VARIABLE, json.dumps(limits))
    client = RankMonitorClient()
    client.init_workload_monitoring()
    assert client.cfg is not None
    assert client.cfg.initial_rank_heartbeat_timeout == 600
    assert client.hb_timeouts == HeartbeatTimeouts(600, 30, were_calculated=False)
    assert client.section_timeouts == SectionTimeouts({"setup": 5, "step": 60}, 90)
    assert not client.section_timeouts.were_calculated
    assert client.state_dict() == {"current_timeouts": {}}


@pytest.mark.parametrize(
    "state",
    [{}, {"current_timeouts": None}, {"current_timeouts": {"heartbeat": {"x": 1}}},
     {"current_timeouts": {"section": [1]}}, {"current_timeouts": 7}],
)  # fmt: skip
def test_a_state_of_another_form_does_no_harm(
    client: RankMonitorClient, state: dict[str, Any]
) -> None:
    client.load_state_dict(state)
    client.send_heartbeat()
    assert client.hb_timeouts is not None
    assert not client.hb_timeouts.are_valid


def with_section(client: RankMonitorClient, name: str) -> None:
    client.start_section(name)
    client.end_section(name)


NVRX_0_4_1: dict[str, dict[str, object]] = {
    # public methods of its RankMonitorClient: parameters after `self`, with their defaults
    "calculate_and_set_hb_timeouts": {"skip_if_not_ready": False},
    "calculate_and_set_section_timeouts": {
        "selected_sections": None,
        "calc_out_of_section": True,
        "skip_if_not_ready": False,
    },
    "end_all_sections": {},
    "end_section": {"section": REQUIRED},
    "init_workload_monitoring": {},
    "load_state_dict": {"state": REQUIRED},
    "send_heartbeat": {},
    "send_workload_control_request": {"req": REQUIRED},
    "shutdown_workload_monitoring": {},
    "start_section": {"section": REQUIRED},
    "state_dict": {},
}
"""What was released as nvidia-resiliency-ext 0.4.1."""


def calls_of(client: type) -> dict[str, dict[str, object]]:
    found = {}
    for name, call in inspect.getmembers(client, inspect.isfunction):
        if not name.startswith("_"):
            _, *parameters = inspect.signature(call).parameters.values()
            found[name] = {one.name: one.default for one in parameters}
    return found


@pytest.mark.parametrize("name", sorted(NVRX_0_4_1))
def test_names_and_parameters_are_those_of_nvrx(name: str) -> None:
    theirs, ours = NVRX_0_4_1[name], calls_of(RankMonitorClient)[name]
    assert list(ours.items())[: len(theirs)] == list(theirs.items())
    assert REQUIRED not in list(ours.values())[len(theirs) :]


def test_other_names_of_nvrx_exist() -> None:
    client = RankMonitorClient()
    for name in ("is_initialized", "cfg", "hb_timeouts", "section_timeouts"):
        assert hasattr(client, name), name
    assert RankMonitorClient.CURRENT_TIMEOUTS_STATE_KEY == "current_timeouts"
    assert [(one.name, one.value) for one in WorkloadAction] == [
        ("Continue", 0),
        ("ExcludeThisNode", 1),
        ("ShutdownWorkload", 2),
    ]
    assert issubclass(nvrx.RankMonitorClientError, Exception)


def test_the_installed_nvrx_matches_its_recorded_names() -> None:
    installed = list(metadata.distributions(name="nvidia-resiliency-ext"))
    if not installed:  # the stand-in would be found under its name
        pytest.skip("NVRx is not installed")
    theirs: Any = importlib.import_module(
        "nvidia_resiliency_ext.fault_tolerance.rank_monitor_client"
    )
    if installed[0].version == "0.4.1":
        assert calls_of(theirs.RankMonitorClient) == NVRX_0_4_1
    for name, parameters in calls_of(theirs.RankMonitorClient).items():
        assert list(calls_of(RankMonitorClient)[name])[: len(parameters)] == list(parameters), name


def test_a_file_of_the_launcher_is_read_wherever_its_section_is(tmp_path: Path) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text(
        "trainer:\n  fault_tolerance:\n    rank_heartbeat_timeout: 30\n    another: 1\n"
        "    rank_section_timeouts: {step: 12.5}\n"
    )
    config = FaultToleranceConfig.from_yaml_file(str(file))
    assert config.rank_heartbeat_timeout == 30
    assert config.rank_section_timeouts == {"step": 12.5}
    with pytest.raises(ValueError, match="NVRx has no such keys: another"):
        FaultToleranceConfig.from_yaml_file(str(file), ignore_not_recognized=False)


def test_a_file_without_the_section_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text("trainer: {}\n")
    with pytest.raises(ValueError, match="has no section `fault_tolerance:`; add one"):
        FaultToleranceConfig.from_yaml_file(str(file))
