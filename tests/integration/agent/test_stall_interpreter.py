"""Does Python still run in a rank? Asked of torch's own server in a process that really hangs."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep_services.agent.stalls.collectives import CollectiveState, read_collectives
from everstep_services.agent.stalls.interpreter import Interpreter, look_into
from tests.waiting import until, until_async
from trainer_sdk import layout

pytest.importorskip("torch")

HANGING = """
import ctypes, signal, sys, threading
from torch._C._distributed_c10d import _WorkerServer

server = _WorkerServer(sys.argv[1])
print("up", flush=True)

def hang():
    match sys.argv[2]:
        case "asleep":
            signal.pause()
        case "busy":
            while True:
                pass
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "gil":
            ctypes.PyDLL(None).pause()  # called without giving the interpreter's lock away
        case "gil-of-another-thread":
            threading.Thread(target=ctypes.PyDLL(None).pause).start()
            signal.pause()

hang()
"""


@contextmanager
def hanging(folder: Path, how: str) -> Iterator["subprocess.Popen[str]"]:
    path = folder / layout.WORKER_SOCKET
    rank = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(path), how], stdout=subprocess.PIPE, text=True
    )
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n"
        until(lambda: path.exists() or None, "its server listens")
        yield rank
    finally:
        rank.kill()
        rank.wait()
        assert rank.stdout is not None
        rank.stdout.close()


async def _settled(folder: Path, *, runs: bool) -> Interpreter:
    """What is found once it hangs, and machine and process have had time to show it."""
    found = await until_async(
        lambda: look_into(folder),
        f"it is found that Python {'runs' if runs else 'does not run'}",
        holds=lambda one: one.runs == runs and (not runs or "in hang" in one.at),
    )
    assert found is not None
    return found


@pytest.mark.parametrize("how", ["asleep", "busy", "lock"])
async def test_a_rank_that_hangs_in_python_says_where(tmp_path: Path, how: str) -> None:
    """The line where it hangs is read (A3.2)."""
    with hanging(tmp_path, how):
        found = await _settled(tmp_path, runs=True)
        assert found.at.startswith("<string>:")


@pytest.mark.parametrize("how", ["gil", "gil-of-another-thread"])
async def test_one_that_holds_the_lock_is_told_apart(tmp_path: Path, how: str) -> None:
    """A hang that holds the interpreter's lock is recognised (A3.2)."""
    with hanging(tmp_path, how):
        await _settled(tmp_path, runs=False)
        # Torch's recorder needs no Python: it answers all the same.
        assert await read_collectives(tmp_path) == CollectiveState(0, "")


async def test_of_one_that_is_stopped_nothing_can_be_told(tmp_path: Path) -> None:
    with hanging(tmp_path, "asleep") as rank:
        rank.send_signal(signal.SIGSTOP)
        until(lambda: _is_stopped(rank.pid) or None, "it is stopped")
        assert await look_into(tmp_path) is None


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
