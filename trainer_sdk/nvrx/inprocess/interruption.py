"""Ends a function in the main thread from another thread, and notices one that stands still."""

import ctypes
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

Result = TypeVar("Result")
_AGAIN_S = 0.1
_SEMAPHORE_BYTES = 64
_raise = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise.argtypes = (ctypes.c_ulong, ctypes.py_object)
_raise.restype = ctypes.c_int
_clear = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


class RankShouldRestart(BaseException):
    """Raised in the wrapped function when another rank, or a limit, ends the iteration."""


class Interruptible:
    """Calls functions that another thread may end; afterwards nothing is raised any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        """The thread in which a function runs now; 0 for none."""
        self._is_over = threading.Event()
        self.atomic_lock = threading.RLock()
        """While the function has it, the function is not interrupted; and the other way round."""

    def call(self, function: Callable[[], Result]) -> Result:
        """The function's result; raises what it raises, or `RankShouldRestart`."""
        self._is_over.clear()
        self._thread = threading.get_ident()
        try:
            try:
                return function()
            finally:
                self._leave()
        except BaseException:
            self._leave()  # an interrupt may have come in the first one
            raise

    def interrupt(self) -> None:
        """Raise `RankShouldRestart` in the function until it has ended. The caller has the lock."""
        while not self._is_over.is_set():
            with self._lock:
                if self._thread and not sys.is_finalizing():
                    _raise(self._thread, RankShouldRestart)
            self._is_over.wait(_AGAIN_S)

    def _leave(self) -> None:
        while True:
            try:
                with self._lock:
                    self._thread = 0
                _clear(threading.get_ident(), None)
                self._is_over.set()
            except RankShouldRestart:
                continue
            else:
                return


class Progress:
    """When the main thread has last run Python code, and when the function last reported."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._ran = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        self._libc.sem_init(self._ran, 0, 1)
        self._seen = monotonic()
        self._pinged: float | None = None
        self.is_paused = False

    def reset(self) -> None:
        """Begin an iteration: the function has reported nothing yet."""
        self._seen, self._pinged = monotonic(), None

    def ping(self) -> None:
        """Note that the function makes progress; from now on it must do so in time."""
        self._pinged = monotonic()

    def look(self) -> float:
        """Seconds since the older of both; it also asks the interpreter for its next sign.

        The sign is a C function that the main thread's interpreter calls between two instructions.
        """
        now = monotonic()
        if self._libc.sem_trywait(self._ran) == 0:
            self._seen = now
            ctypes.pythonapi.Py_AddPendingCall(
                ctypes.cast(self._libc.sem_post, ctypes.c_void_p),
                ctypes.cast(self._ran, ctypes.c_void_p),
            )
        if self.is_paused:
            self._seen = now
            self._pinged = None if self._pinged is None else now
        return now - min(self._seen, self._seen if self._pinged is None else self._pinged)
