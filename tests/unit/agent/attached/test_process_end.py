"""How processes have ended that are not ours to wait for."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from everstep_services.agent.attached.rank_watch import ending_of, is_over
from tests.waiting import until


@contextmanager
def ended(script: str) -> Iterator["tuple[subprocess.Popen[bytes], int]"]:
    """A child that has ended, and that its parent has not reaped."""
    with subprocess.Popen([sys.executable, "-c", script]) as child:
        handle = os.pidfd_open(child.pid)
        until(lambda: is_over(handle), "it has ended")
        yield child, handle
        os.close(handle)


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("raise SystemExit(0)", (0, None)),
        ("raise SystemExit(7)", (7, None)),
        ("import os; os.kill(os.getpid(), 9)", (None, signal.SIGKILL)),
    ],
)
def test_it_is_told_as_long_as_the_parent_does_not_look(
    script: str, ending: tuple[int | None, int | None]
) -> None:
    with ended(script) as (child, handle):
        assert ending_of(child.pid, handle) == ending


def test_after_that_it_is_the_same_or_nothing_but_never_another_one() -> None:
    with ended("raise SystemExit(7)") as (child, handle):
        child.wait()
        assert ending_of(child.pid, handle) in {(7, None), (None, None)}
