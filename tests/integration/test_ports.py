"""Ports for tests: two runs of the tests at the same time are never given the same one."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKS = """
import os
os.getpid = lambda: 7
from tests.e2e.ports import free_port
print(free_port(), flush=True)
input()
"""


def test_two_processes_are_never_given_the_same_port() -> None:
    """Not even before either is bound, and however alike the processes are."""
    with ExitStack() as stack:
        asking = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", ASKS],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(2)
        ]
        given = []
        for one in asking:
            assert one.stdout is not None
            given.append(int(one.stdout.readline()))
        for one in asking:
            one.communicate("\n")
    assert given[0] != given[1]
