"""Urgent work of this process, for which its other work stands back.

`everstep run` alone has its agent and its services in one process. While ranks are started, also
after a failure, services are not imported: both would share a processor, and the interpreter.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Generator
from importlib.abc import MetaPathFinder

_AT_MOST_S = 1.0
"""Ranks that are not back by then wait for something else, or the job is over."""
_TURN_S = 0.0005
"""How long an import may keep the interpreter from the agent: Python's own turns are ten times
as long, and the way from a failure to the next ranks has dozens of them."""


class _UrgentWork:
    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.is_over.set()
        self.over_at = 0.0
        """The latest end. A thread that waits may hold the lock of a module that the loop needs."""
        self.waiting: list[asyncio.Event] = []

    def begin(self) -> None:
        self.over_at = time.monotonic() + _AT_MOST_S
        self.is_over.clear()

    def wait(self) -> None:
        self.is_over.wait(max(0.0, self.over_at - time.monotonic()))


_urgent = _UrgentWork()


def begin_urgent_work() -> None:
    """Have other work stand back until `end_urgent_work`, for a second at most."""
    _urgent.begin()
    asyncio.get_running_loop().call_later(_AT_MOST_S, end_urgent_work)


def end_urgent_work() -> None:
    """Let other work go on."""
    _urgent.is_over.set()
    for over in _urgent.waiting:
        over.set()
    _urgent.waiting.clear()


async def urgent_work_ended() -> None:
    """Return once there is no urgent work."""
    if not _urgent.is_over.is_set():
        over = asyncio.Event()
        _urgent.waiting.append(over)
        await over.wait()


@contextlib.contextmanager
def imports_stand_back() -> Generator[None]:
    """Each module that this thread imports waits until there is no urgent work."""
    turn_s, finder = sys.getswitchinterval(), _PatientFinder()
    sys.setswitchinterval(_TURN_S)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.setswitchinterval(turn_s)


class _PatientFinder(MetaPathFinder):
    """Finds nothing, but is asked first."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, *_: object) -> None:
        if threading.get_ident() == self._thread:
            _urgent.wait()
