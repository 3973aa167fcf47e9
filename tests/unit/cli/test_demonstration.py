"""`everstep demo`, as far as it gets without a training."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep_services.cli.__main__ import main
from everstep_services.cli.demonstration import stage
from everstep_services.cli.errors import Exit


def test_without_torch_it_says_so_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["demo"]) == Exit.ERROR
    said, error = capsys.readouterr()
    missing = f"{sys.executable} has no torch, which the demo trains with: pip install torch"
    assert error == f"everstep: {missing}\n"
    assert said == ""


def test_what_has_ended_by_itself_does_not_keep_the_rest_from_being_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
    monkeypatch.setattr(stage, "_everstep", lambda *_: subprocess.Popen(["/bin/sleep", "600"]))
    monkeypatch.setattr(stage, "descendants", lambda _: {gone.pid: 1})
    agent = stage.DemoAgent(stage.Cluster(tmp_path), "node-1", [])
    assert agent.kill() == 2
    assert agent.poll() == -signal.SIGKILL
