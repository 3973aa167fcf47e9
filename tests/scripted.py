"""Scripts that kill what they have started, many times, and tell in JSON what they found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_SCRIPTS = _ROOT / "tests/integration/scripts"


def run(script: str, *words: object, within_s: float) -> dict[str, Any]:
    """What it found, with nothing in its environment of whoever runs the tests."""
    done = subprocess.run(
        [sys.executable, _SCRIPTS / script, *map(str, words)],
        env={"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
