"""Two launches without an agent do not mix in one place; one after the other may save there."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoint_helpers.saved_by import WITHIN_S
from trainer_sdk import testing
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.writer import root_claim

SCRIPT = Path(__file__).parents[1] / "scripts" / "saving_alone.py"
Launch = Callable[[Path, int], "subprocess.Popen[str]"]


@pytest.fixture
def launch() -> Iterator[Launch]:
    running: list[subprocess.Popen[str]] = []

    def begin(root: Path, step: int) -> "subprocess.Popen[str]":
        command = [sys.executable, str(SCRIPT), str(root), str(step)]
        pipe = subprocess.PIPE
        one = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        running.append(one)
        return one

    yield begin
    for one in running:
        one.kill()
        one.communicate()


def heard(one: "subprocess.Popen[str]") -> str:
    assert one.stdout is not None
    return one.stdout.readline()


def test_a_second_launch_does_not_mix_with_one_that_saves(launch: Launch, tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = launch(root, 1)
    assert heard(first).startswith("committed")
    second, elsewhere = launch(root, 2), launch(tmp_path / "other", 2)
    said = heard(second)
    assert said.startswith("failed")
    assert f"{root} is being saved to by process {first.pid} on " in said
    assert not (root / "step-000000002").exists()
    assert heard(elsewhere).startswith("committed")


@pytest.mark.variant
def test_a_launch_after_one_that_was_killed_saves_where_that_did(
    launch: Launch, tmp_path: Path
) -> None:
    first = launch(tmp_path / "root", 1)
    assert heard(first).startswith("committed")
    first.kill()
    assert heard(launch(tmp_path / "root", 2)).startswith("committed")


def test_one_process_may_save_into_a_place_by_two_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"a": torch.ones(3)}
    with (
        testing.watched(),
        Checkpointer(tmp_path / "root", on_error="fatal") as one,
        Checkpointer(tmp_path / "root", on_error="fatal") as other,
    ):
        for step, saves in enumerate((one, other, one), 1):
            assert saves.save(step, state).wait(WITHIN_S)


def test_a_root_is_locked_again_where_it_was_made_anew(tmp_path: Path) -> None:
    path = str(tmp_path / root_claim.LAUNCH)
    root = root_claim.RootClaim(Folder(str(tmp_path)))
    root.claim("local", "process 1 on here")
    (tmp_path / root_claim.LAUNCH).unlink()
    root.claim("local", "process 1 on here")
    with pytest.raises(BlockingIOError):
        root_claim._locked(path, "process 2 on here")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)])
def test_a_launch_file_that_is_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    make(tmp_path / "root" / root_claim.LAUNCH)
    with testing.watched(), Checkpointer(tmp_path / "root") as saves:
        handle = saves.save(1, {"a": torch.ones(3)})
        handle.wait(WITHIN_S)
    assert f"{tmp_path / 'root' / root_claim.LAUNCH}: " in handle.reason
    assert handle.reason.endswith(": remove it")
