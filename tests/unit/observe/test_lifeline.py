"""An interrupted test run leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.variants import variant
from tests.waiting import until

CONFTEST = """
from tests.e2e import lifeline

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        lifeline.end_with_this_process()
"""
TEST = """
import os, signal, subprocess
from tests.e2e import lifeline

def test_that_is_interrupted():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = lifeline.bare_environment()
    agent = subprocess.Popen(["sleep", "600"], start_new_session=True, env=own)
    with open({pids!r} + ".new", "w") as file:
        file.write(f"{{agent.pid}} {{os.getpid()}}")
    os.rename({pids!r} + ".new", {pids!r})
    agent.wait()
"""


@pytest.mark.parametrize("how", [variant(signal.SIGINT), variant(signal.SIGTERM), signal.SIGKILL])
def test_what_a_run_has_started_ends_with_it(tmp_path: Path, how: signal.Signals) -> None:
    """Also what the workers of xdist have started in a session of its own."""
    pids = tmp_path / "pids"
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST.format(pids=str(pids)))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        until(pids.exists, "the run has begun")
        run.send_signal(how)
        started = [int(pid) for pid in pids.read_text().split()]
        until(lambda: not any(map(is_alive, started)), f"{started} have ended")
    finally:
        run.kill()
        run.wait()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
