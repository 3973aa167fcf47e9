"""The end of a training: its last save is durable, or is its exit reason; its own error stays."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.checkpoint_helpers.saved_by import manifest_of
from tests.variants import variant
from tests.waiting import until
from trainer_sdk import bootstrap

SCRIPT = Path(__file__).parents[1] / "scripts" / "leaving.py"
RANK = (str(Path(bootstrap.__file__).with_name("__main__.py")), "rank", "script")
LAUNCHED = {"alone": (), "by us": RANK}
THEIRS = 'KeyError: "the training\'s own"'
OURS = "it was the last save, so the exit code is 1"


@dataclass
class Left:
    """How it ended, its writer, and where its images were."""

    code: int
    said: str
    writer: int
    images: Path


def leave(folder: Path, launched: str, way: str, storage: str, on_error: str = "fatal") -> Left:
    done = subprocess.run(
        [sys.executable, *LAUNCHED[launched], SCRIPT, folder / "root", way, on_error, storage],
        env=os.environ | {"EVERSTEP_ATTACH": "off"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    writer, images = done.stdout.split()
    until(lambda: _is_over(int(writer)), "the end of the writer")
    return Left(done.returncode, done.stderr, int(writer), Path(images))


@pytest.mark.parametrize(
    ("launched", "way", "code"),
    [
        ("alone", "terminated", 0),
        variant("alone", "exit", 3),
        variant("by us", "returns", 0),
        ("by us", "raise", 1),
    ],
)
def test_the_last_save_is_durable_however_the_script_ends(
    tmp_path: Path, launched: str, way: str, code: int
) -> None:
    """A return, an exit, an exception and SIGTERM (A8.6)."""
    left = leave(tmp_path, launched, way, "works")
    assert left.code == code, left.said
    assert (THEIRS in left.said) is (way == "raise")
    assert OURS not in left.said
    assert manifest_of(tmp_path, 2).identity.job.startswith("leaving-")
    assert left.images.exists() is bool(code), "who comes back after an error wants its images"
    _clean(left.images)


@pytest.mark.parametrize(
    ("launched", "way", "storage", "on_error"),
    [
        ("alone", "returns", "fails", "fatal"),
        variant("alone", "terminated", "hangs", "fatal"),
        variant("by us", "returns", "hangs", "fatal"),
        variant("by us", "terminated", "fails", "retry"),
    ],
)
def test_a_last_save_that_fails_is_the_exit_reason(
    tmp_path: Path, launched: str, way: str, storage: str, on_error: str
) -> None:
    """The exit code is 1, and one line names the save (A8.6)."""
    left = leave(tmp_path, launched, way, storage, on_error)
    assert left.code == 1, left.said
    (line,) = [one for one in left.said.splitlines() if OURS in one]
    assert line.startswith("everstep: rank 0: the save of step 2 failed at write of ")
    assert left.images.exists()
    _clean(left.images)


@pytest.mark.parametrize(
    ("launched", "way", "storage", "code"),
    [
        variant("alone", "raise", "fails", 1),
        variant("alone", "exit", "fails", 3),
        ("by us", "raise", "hangs", 1),
        variant("by us", "exit", "fails", 3),
    ],
)
def test_the_trainings_own_end_stays_the_reason(
    tmp_path: Path, launched: str, way: str, storage: str, code: int
) -> None:
    """The script's exception and exit code are not replaced (A8.6)."""
    left = leave(tmp_path, launched, way, storage)
    assert left.code == code, left.said
    assert (THEIRS in left.said) is (way == "raise")
    assert "rank 0: the save of step 2 failed" in left.said
    assert OURS not in left.said
    _clean(left.images)


def test_where_failures_are_only_said_the_last_one_is_too(tmp_path: Path) -> None:
    left = leave(tmp_path, "by us", "returns", "fails", "warn")
    assert left.code == 0, left.said
    assert "rank 0: the save of step 2 failed" in left.said
    assert not left.images.exists()


def test_a_killed_rank_takes_its_writer_with_it(tmp_path: Path) -> None:
    left = leave(tmp_path, "alone", "killed", "works")
    assert left.images.exists()
    _clean(left.images)


def _is_over(pid: int) -> bool:
    """Also if nobody has taken notice of its end."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _clean(images: Path) -> None:
    subprocess.run(["rm", "-rf", images.parents[1]], check=True)
