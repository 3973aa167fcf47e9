"""Agents killed again and again while they keep, send, fetch and drop states."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def test_500_kills_of_agents_at_counted_points_lose_nothing_and_leave_nothing() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        done = subprocess.run(
            [sys.executable, ROOT / "tests/integration/scripts/keeping.py", memory, "500", "20"],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=890,
            check=False,
        )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["left"] == []
    assert sum(found["killed"].values()) == 500
