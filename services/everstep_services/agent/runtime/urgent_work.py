"""Urgent work of this process, for which its other work stands back.

`everstep run` alone has its agent and its services in one process. While ranks are started, also
after a failure, services are not imported: both would share a processor, and the interpreter.
"""

import threading

_AT_MOST_S = 1.0
"""Of each wait: a job that fails again and again gets its services, too."""

_is_calm = threading.Event()
_is_calm.set()


def begin_urgent_work() -> None:
    """Have other work stand back until `end_urgent_work`."""
    _is_calm.clear()


def end_urgent_work() -> None:
    """Let other work go on."""
    _is_calm.set()


def stand_back() -> None:
    """Wait in this thread until there is no urgent work, within a bound."""
    _is_calm.wait(_AT_MOST_S)
