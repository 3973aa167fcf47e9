"""Runs a function in the main thread, by a signal that is rarely used."""

import signal
import threading
from collections import deque
from collections.abc import Callable

_SIGNAL = signal.SIGRTMAX - 1

_waiting: deque[Callable[[], None]] = deque()


def take_signal() -> None:
    """Set the handler; called once, in the main thread, as only that may set handlers."""
    signal.signal(_SIGNAL, _handle)
    signal.siginterrupt(_SIGNAL, False)  # noqa: FBT003 - positional only


def in_main_thread(act: Callable[[], None]) -> None:
    """Run `act` in the main thread, between two instructions of the script; its errors rise there.

    If the main thread is outside of Python, `act` runs when it returns.
    """
    _waiting.append(act)
    ident = threading.main_thread().ident
    assert ident is not None, "the main thread has begun"
    signal.pthread_kill(ident, _SIGNAL)


def _handle(*_: object) -> None:
    while _waiting:
        _waiting.popleft()()
