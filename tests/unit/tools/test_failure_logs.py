"""What the report of a failed test has of the logs of its processes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e import failure_logs


def test_the_end_of_each_log_is_shown_and_empty_ones_are_not(tmp_path: Path) -> None:
    ranks = tmp_path / "logs" / "rank-0"
    ranks.mkdir(parents=True)
    (ranks / "stderr").write_bytes(b"loss \xff")
    (ranks / "stdout").touch()
    (tmp_path / "train.py").write_text("not a log")
    (tmp_path / "agent.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    agent, rank = failure_logs.ends(tmp_path, ())
    assert agent[0] == "end of agent.log"
    assert agent[1].splitlines() == [f"line {number}" for number in range(940, 1000)]
    assert rank == ("end of logs/rank-0/stderr", "loss \N{REPLACEMENT CHARACTER}")


def test_of_very_many_logs_the_newest_are_shown(tmp_path: Path) -> None:
    for number in range(100):
        log = tmp_path / f"{number:02}.out"
        log.write_text("text")
        os.utime(log, (number, number))
    titles = [title for title, _ in failure_logs.ends(tmp_path, ())]
    assert titles == [f"end of {number}.out" for number in range(60, 100)]


@pytest.fixture(autouse=True)
def _nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_logs, "_shared", {})


def test_only_tests_that_use_a_shared_control_plane_show_its_logs(tmp_path: Path) -> None:
    (tmp_path / "up.log").write_text("ready")
    with failure_logs.shared("a_plane", tmp_path):
        assert failure_logs.ends(None, ("a_plane",)) == [("end of up.log", "ready")]
        assert failure_logs.ends(None, ("tmp_path",)) == []
    assert failure_logs.ends(None, ("a_plane",)) == []


def test_the_logs_of_a_control_plane_that_fails_to_start_are_shown(tmp_path: Path) -> None:
    (tmp_path / "up.log").write_text("the port is taken")
    with pytest.raises(AssertionError), failure_logs.shared("a_plane", tmp_path):
        raise AssertionError("it is not ready")
    assert failure_logs.ends(None, ("a_plane",)) == [("end of up.log", "the port is taken")]


def test_the_output_of_a_program_that_fails_is_shown() -> None:
    script = "echo begins; echo no space left >&2; exit 3"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        subprocess.run(["bash", "-c", script], check=True, capture_output=True)
    assert failure_logs.output(failed.value) == [
        ("end of its stdout", "begins"),
        ("end of its stderr", "no space left"),
    ]
    assert failure_logs.output(AssertionError()) == []
