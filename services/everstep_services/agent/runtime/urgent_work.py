"""Urgent work of this process, for which its other work stands back.

`everstep run` alone has its agent and its services in one process. While ranks are started, also
after a failure, services are not imported: both would share a processor, and the interpreter.
"""

import asyncio
import threading

_AT_MOST_S = 1.0
"""Ranks that are not back by then wait for something else, or the job is over."""

_is_calm = threading.Event()
_is_calm.set()


def begin_urgent_work() -> None:
    """Have other work stand back until `end_urgent_work`, for a second at most."""
    _is_calm.clear()
    asyncio.get_running_loop().call_later(_AT_MOST_S, end_urgent_work)


def end_urgent_work() -> None:
    """Let other work go on."""
    _is_calm.set()


def stand_back() -> None:
    """Wait in this thread until there is no urgent work."""
    _is_calm.wait(_AT_MOST_S)  # the loop that would end it may be gone
