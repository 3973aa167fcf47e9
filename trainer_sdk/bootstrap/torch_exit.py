"""Waits at the end of a rank for the threads of torch that could abort it.

Once the interpreter finalizes, it ends every thread that asks for its lock; since Python 3.14, such
a thread waits for ever. If torch's C++ has started the thread, its end aborts the process, and a
training that has succeeded counts as failed. Two kinds of such threads may ask late: those of gloo
and NCCL, which free the tensors of the last collectives, and those of the worker server, which
answer requests for a traceback.
"""

import atexit
import os
import sys
from time import monotonic, sleep

_MOST_S = 2.0
_EVERY_S = 0.001
_THREADS = (b"pt_gloo_runloop", b"pt_nccl_watchdg", b"pt_workerserver")
_CONNECTED = b"03"
_STATE, _INODE = 5, 6
"""The fields of a line of /proc/net/unix."""
_NOT_ACCEPTED = b"0"
"""The inode of a connection that nobody has accepted yet."""
_SLEEPS = b"S"
_SWITCHES = b"voluntary_ctxt_switches:"
_OTHERS_WAIT = 2.0
"""In switch intervals: a thread that waits for the lock wakes up once in an interval."""

_waits = False
_served: tuple[int, str, str] | None = None
"""Which process serves tracebacks, its socket as it has bound it, and where that socket is."""


def served_at(bound: str, socket: str) -> None:
    """Note that this process has torch's worker server: its socket is removed at the exit."""
    global _served  # noqa: PLW0603  a process has one
    _served = (os.getpid(), bound, socket)


def wait_at_exit() -> None:
    """Have this process wait when it exits, after all exit handlers that are registered later."""
    global _waits  # noqa: PLW0603  a process ends once
    if not _waits:
        _waits = True
        atexit.register(_wait)


def _wait() -> None:
    if "torch" not in sys.modules:
        return
    bound = b""
    if _served is not None and _served[0] == os.getpid():  # a fork does not have its threads
        bound = os.fsencode(_served[1])
        try:  # noqa: SIM105  contextlib would cost every rank
            os.unlink(_served[2])
        except OSError:
            pass
    until, before = monotonic() + _MOST_S, _looks()
    restless = set(before)
    while True:
        # A thread that waits for the interpreter's lock gets it now.
        sleep(min(_pause_s(), max(until - monotonic(), 0.0)))
        looks = _looks()
        # NCCL's threads look at their collectives ten times a second: one quiet pause is enough.
        restless = {
            thread
            for thread, look in looks.items()
            if look[0] != _SLEEPS or (thread in restless and look != before.get(thread))
        }
        if monotonic() >= until or not (restless or _is_asked(bound)):
            return
        before = looks


def _pause_s() -> float:
    """Long enough to see a thread wait for the lock, while another Python thread may hold it."""
    if len(sys._current_frames()) == 1:  # noqa: SLF001  documented, and there is nothing else
        return _EVERY_S
    return max(_EVERY_S, _OTHERS_WAIT * sys.getswitchinterval())


def _is_asked(bound: bytes) -> bool:
    """Whether a request to the worker server is not answered yet."""
    if not bound:
        return False
    try:
        with open("/proc/self/net/unix", "rb") as file:
            named = [line.split() for line in file if line.rstrip().endswith(b" " + bound)]
        connected = {fields[_INODE] for fields in named if fields[_STATE] == _CONNECTED}
        # Other processes may have bound sockets of the same name.
        return bool(connected) and not connected.isdisjoint({_NOT_ACCEPTED, *_own_sockets()})
    except OSError:  # some sandboxes have no such files
        return False


def _own_sockets() -> list[bytes]:
    sockets = []
    for descriptor in os.listdir(b"/proc/self/fd"):
        try:
            link = os.readlink(b"/proc/self/fd/" + descriptor)
        except OSError:  # it is closed
            continue
        if link.startswith(b"socket:["):
            sockets.append(link[len(b"socket:[") : -1])
    return sockets


def _looks() -> dict[str, tuple[bytes, bytes]]:
    """Of each thread of torch that may ask for the lock: its state, and how often it has slept."""
    threads: dict[str, tuple[bytes, bytes]] = {}
    try:
        running = os.listdir("/proc/self/task")
    except OSError:  # not in every sandbox, and not without a free descriptor
        return threads
    for thread in running:
        try:
            with open(f"/proc/self/task/{thread}/stat", "rb") as file:
                head, _, tail = file.read().rpartition(b") ")
            if head.partition(b"(")[2] in _THREADS:
                threads[thread] = (tail[:1], _switches(thread))
        except OSError:  # it has ended
            continue
    return threads


def _switches(thread: str) -> bytes:
    with open(f"/proc/self/task/{thread}/status", "rb") as file:
        return next((line for line in file if line.startswith(_SWITCHES)), b"")
