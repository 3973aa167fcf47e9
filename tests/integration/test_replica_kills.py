"""Agents killed wherever they keep, send, fetch or drop a state: a verified one is always there."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/integration/scripts/keeping.py"


def test_50_kills_of_agents_at_counted_points_lose_nothing_and_leave_nothing() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        done = subprocess.run(
            [sys.executable, SCRIPT, memory, "50", "1"],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=55,
            check=False,
        )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["left"] == []
    assert sum(found["killed"].values()) == 50
    assert min(found["killed"].values()) >= 10
