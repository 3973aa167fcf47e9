"""The end of a training: its last save is durable, its own error stays, and nothing is left."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.saved_by import manifest_of
from tests.waiting import until

SCRIPT = Path(__file__).parent / "scripts" / "leaving.py"


def leave(folder: Path, way: str) -> tuple[subprocess.CompletedProcess[str], int, Path]:
    """How it ended, its writer, and where its images were."""
    done = subprocess.run(
        [sys.executable, SCRIPT, folder / "root", way],
        env=os.environ | {"EVERSTEP_ATTACH": "off"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    writer, images = done.stdout.split()
    return done, int(writer), Path(images)


@pytest.mark.parametrize("way", ["returns", "raise"])
def test_the_last_save_is_durable_however_the_script_ends(tmp_path: Path, way: str) -> None:
    done, writer, images = leave(tmp_path, way)
    assert done.returncode == (1 if way == "raise" else 0)
    assert ('KeyError: "the training\'s own"' in done.stderr) is (way == "raise")
    assert manifest_of(tmp_path, 2).identity.job == "leaving"
    until(lambda: _is_over(writer), "the end of the writer")
    assert images.exists() is (way == "raise"), "who comes back after an error wants its images"
    _clean(images)


def test_a_killed_rank_takes_its_writer_with_it(tmp_path: Path) -> None:
    _, writer, images = leave(tmp_path, "killed")
    until(lambda: _is_over(writer), "the end of the writer")
    assert images.exists()
    _clean(images)


def _is_over(pid: int) -> bool:
    """Also if nobody has taken notice of its end."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _clean(images: Path) -> None:
    subprocess.run(["rm", "-rf", images.parents[1]], check=True)
