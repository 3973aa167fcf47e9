"""Ranks and writers killed again and again: whoever comes next goes on from a verified state."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).parents[1] / "integration/scripts"


def run(script: str, *arguments: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=890,
        check=False,
    )
    assert not done.returncode, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_500_kills_of_writers_at_counted_points_lose_nothing_that_was_visible(
    tmp_path: Path,
) -> None:
    found = run("killing.py", tmp_path, 500, 20)
    assert found["wrong"] == []
    assert found["killed"] == 500


def test_a_training_killed_100_times_takes_the_steps_of_an_undisturbed_one(tmp_path: Path) -> None:
    found = run("killed_training.py", tmp_path, 100, 3)
    assert found["wrong"] == []
    assert found["killed"] == 100
