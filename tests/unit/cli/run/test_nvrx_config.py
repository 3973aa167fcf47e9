"""`--ft-cfg-path FILE`: each key of NVRx's file is taken, or named with a reason and its line."""

from pathlib import Path
from typing import Any

import pytest

from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.errors import CliError
from everstep_services.cli.run.arguments import Given, scan
from everstep_services.cli.run.limit_rules import limits_of

KEYS: dict[str, object] = {
    # the fields of FaultToleranceConfig in nvidia-resiliency-ext 0.7.0, with other values
    "workload_check_interval": 1.0,
    "initial_rank_heartbeat_timeout": 600,
    "rank_heartbeat_timeout": 30.5,
    "rank_section_timeouts": "{setup: 600, step: 60, eval: null}",
    "rank_out_of_section_timeout": 90,
    "node_health_check_interval": 5,
    "safety_factor": 4.0,
    "rank_termination_signal": "SIGKILL",
    "log_level": "DEBUG",
    "restart_check_interval": 60,
    "enable_nic_monitor": "false",
    "enable_nic_healthcheck": "true",
    "enable_dist_storage_healthcheck": "true",
    "storage_healthcheck_path": "/data",
    "pci_topo_file": "topo.xml",
    "link_down_path_template": "/sys/{nic}",
    "link_state_path_template": "/sys/{nic}/state",
    "skip_section_response": "true",
    "segment": 4,
    "numa_bind_strict": "true",
    "gpu_memory_reclaim_timeout": 50,
    "gpu_memory_tolerance_mb": 512,
    "gpu_memory_poll_interval": 2,
    "check_remaining_processes": "true",
    "max_no_progress_cycles": 7,
    "min_progress_iterations": 1,
    "checkpoint_iteration_file": "/it",
    "install_exception_hook": "true",
    "num_warmup_iterations": 8,
    "attribution_endpoint": "localhost",
    "attribution_stop_action": "no-restart",
    "attribution_export_url": "http://there",
    "cycle_info_dir": "/cycles",
    "segment_health_check_dir": "/segments",
}
TAKEN = {
    "initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_section_timeouts",
    "rank_out_of_section_timeout", "segment", "max_no_progress_cycles", "num_warmup_iterations",
    "attribution_stop_action", "numa_bind_strict",
}  # fmt: skip


def written(folder: Path, text: str) -> str:
    path = folder / "ft.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def read(folder: Path, text: str, *words: str) -> Given:
    return scan(["--ft-cfg-path", written(folder, text), *words, "x.py"], {})


def error_of(folder: Path, text: str) -> str:
    with pytest.raises(CliError) as error:
        read(folder, text)
    assert error.value.code == 2
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(folder), "")


def test_each_key_of_nvrx_is_taken_or_named_with_its_line_and_a_reason(tmp_path: Path) -> None:
    """A user of NVRx changes nothing in the file, and sees what has no effect (users.md §12)."""
    lines = [f"  {key}: {value}" for key, value in KEYS.items()]
    given = read(tmp_path, "\n".join(["fault_tolerance:", *lines]))
    for number, key in enumerate(KEYS, start=2):
        origin = f"{tmp_path}/ft.yaml, line {number}: {key}"
        notes = [note for note in given.notes if note.startswith(origin)]
        assert notes, key
        assert all((" is taken as --" in note) == (key in TAKEN) for note in notes), notes
        assert all(" is not used: " in note for note in notes if key not in TAKEN), notes
        assert "no such key" not in "".join(notes)
    assert given.values["segment"] == 4
    assert given.values["no_progress_limit"] == 7
    assert given.values["stop_on_repeat"] is True
    rules = limits_of(given, AgentSettings())
    assert rules.configured == {
        "first-step": 600, "heartbeat": 30.5, "setup": 600, "step": 60, "outside": 90,
    }  # fmt: skip
    assert rules.warmup_steps == 8
    assert rules.is_outside_late
    assert rules.origins["step"] == f"{tmp_path}/ft.yaml, line 5: rank_section_timeouts"


def test_the_section_may_be_anywhere_and_null_means_not_given(tmp_path: Path) -> None:
    text = "a: [1]\nb:\n  - c:\n      fault_tolerance:\n        rank_heartbeat_timeout: null\n"
    given = read(tmp_path, text)
    assert given.notes == []
    assert limits_of(given, AgentSettings()).configured == {}


@pytest.mark.parametrize("value", ["soon", "0", "-3"])
def test_a_wrong_limit_is_named_with_file_line_and_key(tmp_path: Path, value: str) -> None:
    text = f"fault_tolerance:\n  rank_section_timeouts: {{step: 60, eval: {value}}}\n"
    with pytest.raises(CliError, match="write a number of seconds above 0") as error:
        limits_of(read(tmp_path, text), AgentSettings())
    assert f"{tmp_path}/ft.yaml, line 2: rank_section_timeouts 'eval: {value}': " in str(
        error.value
    )


def test_a_wrong_heartbeat_is_named_with_file_line_and_key(tmp_path: Path) -> None:
    text = "fault_tolerance:\n  rank_heartbeat_timeout: soon\n"
    with pytest.raises(CliError, match="line 2: rank_heartbeat_timeout 'soon': write a number"):
        limits_of(read(tmp_path, text), AgentSettings())


def test_two_sections_are_refused_with_both_lines(tmp_path: Path) -> None:
    text = "fault_tolerance:\n  segment: 4\nb:\n  fault_tolerance:\n    segment: 2\n"
    assert "line 4: fault_tolerance was given in line 1 already: remove one" in error_of(
        tmp_path, text
    )


def test_an_alias_of_the_section_is_the_same_section(tmp_path: Path) -> None:
    text = "fault_tolerance: &ft\n  segment: 4\nb:\n  fault_tolerance: *ft\n"
    assert read(tmp_path, text).values["segment"] == 4


@pytest.mark.parametrize(("key", "hint"), [("bogus_key", ""), ("log_levle", "log_level")])
def test_only_near_names_are_suggested(tmp_path: Path, key: str, hint: str) -> None:
    (note,) = read(tmp_path, f"fault_tolerance:\n  {key}: 1\n").notes
    assert note.endswith(f"; did you mean {hint}?" if hint else "NVRx has no such key")


def test_an_option_wins_over_the_file(tmp_path: Path) -> None:
    text = "fault_tolerance:\n  segment: 4\n  rank_heartbeat_timeout: 5\n"
    given = read(tmp_path, text, "--ft-segment", "2", "--ft-rank-heartbeat-timeout=9")
    assert given.values["segment"] == 2
    assert limits_of(given, AgentSettings()).configured == {"heartbeat": 9}
    assert f"{tmp_path}/ft.yaml, line 2: segment is not used: --ft-segment was given" in given.notes


@pytest.mark.parametrize("none", ["null", "none", ""])
def test_an_option_switches_off_what_the_file_has(tmp_path: Path, none: str) -> None:
    text = "fault_tolerance:\n  rank_heartbeat_timeout: 5\n"
    given = read(tmp_path, text, "--ft-rank-heartbeat-timeout", none)
    assert limits_of(given, AgentSettings()).configured == {}
    assert given.notes == [
        f"{tmp_path}/ft.yaml, line 2: rank_heartbeat_timeout is not used: "
        "--ft-rank-heartbeat-timeout switches it off"
    ]


def test_warmup_has_as_many_steps_as_the_file_says(tmp_path: Path) -> None:
    text = "fault_tolerance:\n  rank_section_timeouts: {warmup: 300, step: 60}\n"
    rules = limits_of(read(tmp_path, text), AgentSettings())
    assert (rules.configured, rules.warmup_steps) == ({"first-step": 300, "step": 60}, 5)
    rules = limits_of(read(tmp_path, text + "  num_warmup_iterations: 3\n"), AgentSettings())
    assert rules.warmup_steps == 3


def test_an_unknown_key_is_named_with_a_guess(tmp_path: Path) -> None:
    given = read(tmp_path, "fault_tolerance:\n  rank_hartbeat_timeout: 5\n")
    assert given.notes == [
        f"{tmp_path}/ft.yaml, line 2: rank_hartbeat_timeout is not used: NVRx has no such key; did "
        "you mean rank_heartbeat_timeout?"
    ]


def test_a_file_without_the_section_is_refused_unless_allowed(tmp_path: Path) -> None:
    assert "it has no section `fault_tolerance:`; add one, or give" in error_of(tmp_path, "a: 1")
    assert "it has no section" in error_of(tmp_path, "")
    assert read(tmp_path, "", "--ft-ignore-missing-cfg").notes == []
    given = read(tmp_path, "a: 1", "--ft-rank-heartbeat-timeout", "9")
    assert limits_of(given, AgentSettings()).configured == {"heartbeat": 9}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fault_tolerance:\n  a: [1\nb: 2\n", "/ft.yaml, line 3: this is not YAML: expected"),
        ("a:\tb:\n\t- c", "this is not YAML:"),
        ("fault_tolerance: [1, 2]\n", "/ft.yaml, line 1: fault_tolerance: write keys and values"),
        ("fault_tolerance:\n  segment: x\n", "/ft.yaml, line 2: segment 'x': expected a whole"),
        ("fault_tolerance:\n  segment: [1]\n", "/ft.yaml, line 2: segment: expected a number, a"),
        ("fault_tolerance:\n  segment: 1\n  segment: 2\n", "line 3: segment was given in line 2"),
        ("fault_tolerance:\n  [a]: 1\n", "/ft.yaml, line 2: a key is a name"),
        (
            "fault_tolerance:\n  attribution_endpoint: {a: {b: c}}\n",
            "line 2: attribution_endpoint:",
        ),
        ("\x00\x01", "this is not YAML"),
        ("[" * 1000, "this is not YAML"),
        ("x" * (1 << 21), "are too many for such a file"),
    ],
)
def test_a_malformed_file_is_refused_with_line_and_key(
    tmp_path: Path, text: str, said: str
) -> None:
    assert said in error_of(tmp_path, text)


def test_a_section_limit_that_is_no_time_names_its_line(tmp_path: Path) -> None:
    given = read(tmp_path, "fault_tolerance:\n  rank_section_timeouts: {step: soon}\n")
    with pytest.raises(CliError, match="step: soon"):
        limits_of(given, AgentSettings())


def test_aliases_and_anchors_do_not_loop(tmp_path: Path) -> None:
    text = "a: &a\n  b: *a\nfault_tolerance:\n  segment: &n 2\n  log_level: *n\n"
    given: Any = read(tmp_path, text)
    assert given.values["segment"] == 2
