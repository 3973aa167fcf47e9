"""Scripts that kill what they have started, many times, and tell in JSON what they found."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

_ROOT = Path(__file__).parents[1]
_SCRIPTS = _ROOT / "tests/integration/scripts"
Found = TypeVar("Found")


def run(
    script: str, *words: object, within_s: float, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What it found, with nothing of the tests' own environment in its environment."""
    done = subprocess.run(
        [sys.executable, _SCRIPTS / script, *map(str, words)],
        env={"PYTHONPATH": str(_ROOT)} | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def apart(look: Callable[[], Found]) -> Found:
    """In a fork: an object store's client has threads, which the writers' forks would miss."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with open(writing, "w") as told:
            json.dump(look(), told)
        os._exit(0)
    os.close(writing)
    with open(reading) as heard:
        found = heard.read()
    os.waitpid(child, 0)
    said: Found = json.loads(found)
    return said
