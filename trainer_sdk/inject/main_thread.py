"""Has something run in the main thread, wherever that is: by a signal that nobody else uses."""

import signal
import threading
from collections import deque
from collections.abc import Callable

_SIGNAL = signal.SIGRTMAX - 1

_waiting: deque[Callable[[], None]] = deque()


def take_signal() -> None:
    """Call it once, in the main thread: no other may set a handler."""
    signal.signal(_SIGNAL, _handle)
    signal.siginterrupt(_SIGNAL, False)  # noqa: FBT003 - positional only


def in_main_thread(act: Callable[[], None]) -> None:
    """Have it run there, between two instructions of the script; what it raises is raised there.

    A main thread that waits outside of Python comes to it when it is back.
    """
    _waiting.append(act)
    ident = threading.main_thread().ident
    assert ident is not None, "the main thread has begun"
    signal.pthread_kill(ident, _SIGNAL)


def _handle(*_: object) -> None:
    while _waiting:
        _waiting.popleft()()
