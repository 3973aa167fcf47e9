"""What a test run has started ends with it, however the run ends.

Run as a program, this waits for the end of the run, and kills all that carries its mark. Marks are
inherited by environment: also agents, ranks and servers with a session of their own have them.
"""

import os
import select
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

_MARK = "TEST_RUNS"
_KEPT = ("PATH", "LANG", _MARK)
_ENDS_WITHIN_S = 1.0


def end_with_this_process() -> None:
    """Have all that this process starts from now on killed when it ends."""
    mark, environment = uuid.uuid4().hex, dict(os.environ)
    os.environ[_MARK] = f"{os.environ.get(_MARK, '')},{mark}"  # a run may be within another one
    watcher = subprocess.Popen(
        [sys.executable, "-S", __file__, str(os.getpid()), mark],
        env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    watcher.returncode = 0  # nobody waits for it: it outlives this process


def bare_environment() -> dict[str, str]:
    """Nothing of the person who runs the tests, but what ends with their run."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def _marked(mark: bytes) -> list[int]:
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


def _main(process: str, mark: str) -> None:
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(process))], [], [])
    while pids := _marked(mark.encode()):
        for pid in pids:
            with suppress(ProcessLookupError):
                process_fd = os.pidfd_open(pid)
                signal.pidfd_send_signal(process_fd, signal.SIGKILL)
                select.select([process_fd], [], [], _ENDS_WITHIN_S)
                os.close(process_fd)


if __name__ == "__main__":
    _main(*sys.argv[1:])
