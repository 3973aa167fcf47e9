"""The end of a training: its last saves are durable, or what they failed of is its exit reason.

Python has settled its exit code before exit handlers run. So our bootstrap asks here as soon as
the script has ended, before anybody is told of it; where another launcher runs the script, the C
library is given another code.
"""

import atexit
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from trainer_sdk.bootstrap import link as links
from trainer_sdk.saying import say

if TYPE_CHECKING:
    from trainer_sdk.checkpoint.save.request import SaveError

_FAILED = 1
_exit = sys.exit


@dataclass(frozen=True, slots=True)
class OpenSaver:
    """What the end of a script does about something that saves, and may be saving still."""

    await_all: "Callable[[], SaveError | None]"
    """Waits for what was begun, with a bound; what the training must end with."""
    leave: "Callable[[bool], SaveError | None]"
    """The same, and leaves nothing behind; images stay if the training is failing."""


_open: list[OpenSaver] = []
_code: object = 0
"""What the script exits with, as far as it is known."""


def remember(ending: OpenSaver) -> None:
    """The end of the interpreter waits for these, unless they are closed before."""
    if links.armed is None:
        sys.exit = _exit_noted  # our bootstrap would tell it
    _open.append(ending)
    atexit.unregister(_leave)
    atexit.register(_leave)


def forget(ending: OpenSaver) -> None:
    """Its saves are closed."""
    if ending in _open:
        _open.remove(ending)


def is_good_end(error: BaseException) -> bool:
    """A script leaves by it as by its last line."""
    return isinstance(error, SystemExit) and not error.code


def script_ended(code: int) -> "SaveError | None":
    """Our bootstrap tells what the script ends with; the failed save that it is to end with.

    A success becomes one only when all saves are over.
    """
    global _code  # noqa: PLW0603 - a process ends once
    _code = code
    if code:
        return None
    failures = [one.await_all() for one in _open]
    failure = next(filter(None, failures), None)
    if failure is not None:
        _code = _FAILED
        _say(failure)
    return failure


def _leave() -> None:
    is_failing = bool(_code) or getattr(sys, "last_value", None) is not None
    failures = [_left(one, is_failing=is_failing) for one in _open.copy()]
    failure = next(filter(None, failures), None)
    if failure is not None and not is_failing:
        sys.last_value = failure  # whoever leaves later looks there for the reason
        _say(failure)
        _exit_with(_FAILED)


def _left(ending: OpenSaver, *, is_failing: bool) -> "SaveError | None":
    try:
        return ending.leave(is_failing)
    except Exception:  # noqa: BLE001 - what the training wanted to be called when a save is durable
        traceback.print_exc()
        return None


def _say(failure: "SaveError") -> None:
    say(f"{failure}; it was the last one, so the exit code is {_FAILED}")


def _exit_noted(code: object = None, /) -> NoReturn:
    """As `sys.exit`, of which no exit handler could know otherwise."""
    global _code  # noqa: PLW0603 - as above
    if threading.current_thread() is threading.main_thread():
        _code = code
    _exit(code)  # type: ignore[arg-type]


def _exit_with(code: int) -> None:
    """Exit with this after all, once everything else that is to run at the end has run.

    On Linux, the code of the last call of `exit` counts, also of one by an exit handler of C's.
    """
    library = ctypes.CDLL(None)
    register = library["__cxa_atexit"]
    register(ctypes.cast(library.exit, ctypes.c_void_p), ctypes.c_void_p(code), None)


os.register_at_fork(after_in_child=_open.clear)
