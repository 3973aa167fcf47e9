"""Waits at the end of a rank for the threads of torch that could abort it.

Once the interpreter finalizes, it ends every thread that asks for its lock. If torch's C++ has
started the thread, that aborts the process, and a training that has succeeded counts as failed. Two
kinds of such threads may ask late: those of gloo and NCCL, which free the tensors of the last
collectives, and those of the worker server, which answer requests for a traceback.
"""

import atexit
import os
import sys
from time import monotonic, sleep

_MOST_S = 2.0
_EVERY_S = 0.001
_THREADS = (b"pt_gloo_runloop", b"pt_nccl_watchdg", b"pt_workerserver")
_CONNECTED = b"03"
_STATE = 5
"""The field of a line of /proc/net/unix."""
_SLEEPS = b"S"

_server = ""
"""The path of the worker server's socket, as the process has bound it."""


def served_at(path: str) -> None:
    """Note under which path torch's worker server of this process listens."""
    global _server  # noqa: PLW0603  a process has one
    _server = path


def wait_at_exit(socket: str) -> None:
    """Have this process wait when it exits, after all exit handlers that are registered later.

    `socket` is where the worker server's socket will be; nobody can connect from then on.
    """
    atexit.register(_wait, socket, os.getpid())


def _wait(socket: str, process: int) -> None:
    if "torch" not in sys.modules or os.getpid() != process:
        return  # a fork has none of the threads
    if _server:
        try:  # noqa: SIM105  contextlib would cost every rank
            os.unlink(socket)
        except OSError:
            pass
    until = monotonic() + _MOST_S
    while True:
        sleep(_EVERY_S)  # a thread that waits for the interpreter's lock gets it now
        if monotonic() > until or not (_is_asked() or _some_thread_runs()):
            return


def _is_asked() -> bool:
    """Whether a request to the worker server is not answered yet."""
    if not _server:
        return False
    bound = os.fsencode(_server)
    try:
        with open("/proc/self/net/unix", "rb") as file:
            ours = [line.split() for line in file if line.rstrip().endswith(b" " + bound)]
    except OSError:  # some sandboxes have no such file
        return False
    return any(fields[_STATE] == _CONNECTED for fields in ours)


def _some_thread_runs() -> bool:
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/stat", "rb") as file:
                head, _, tail = file.read().rpartition(b") ")
        except OSError:  # it has ended
            continue
        if head.partition(b"(")[2] in _THREADS and tail[:1] != _SLEEPS:
            return True
    return False
