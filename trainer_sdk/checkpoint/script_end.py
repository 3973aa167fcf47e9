"""The end of a script: it waits for the last saves, and fails if one of them must be durable.

Python fixes its exit code before exit handlers run. So our bootstrap asks this module as soon as
the script has ended, before it reports the end; under another launcher, this module changes the
exit code through the C library.
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

from trainer_sdk.bootstrap import agent_link as links
from trainer_sdk.sdk_log import warn

if TYPE_CHECKING:
    from trainer_sdk.checkpoint.save.request import SaveError

_FAILED = 1
_exit = sys.exit


@dataclass(frozen=True, slots=True)
class OpenSaver:
    """The calls of the script's end to a saver that may still be saving."""

    await_all: "Callable[[], SaveError | None]"
    """Waits for the saves that were begun, with a bound; the failure that must end the training."""
    leave: "Callable[[bool], SaveError | None]"
    """The same, and releases everything; images stay if the training is failing."""


_open: list[OpenSaver] = []
_code: object = 0
"""The script's exit code, as far as it is known."""


def remember(ending: OpenSaver) -> None:
    """Have the interpreter wait for this saver before it ends."""
    forget(ending)
    if links.bootstrap_link is None:
        sys.exit = _exit_noted  # our bootstrap would report the code
    _open.append(ending)
    atexit.unregister(_leave)
    atexit.register(_leave)


def forget(ending: OpenSaver) -> None:
    """Remove a saver that is closed."""
    if ending in _open:
        _open.remove(ending)


def is_good_end(error: BaseException) -> bool:
    """Whether a script that exits by this error has succeeded."""
    return isinstance(error, SystemExit) and not error.code


def script_ended(code: int) -> "SaveError | None":
    """Called by our bootstrap with the exit code; the failed save that must end the script.

    A success counts only once all saves are over.
    """
    global _code  # noqa: PLW0603 - a process ends once
    _code = code
    if code:
        return None
    failures = [saver.await_all() for saver in _open]
    failure = next(filter(None, failures), None)
    if failure is not None:
        _code = _FAILED
        _warn(failure)
    return failure


def _leave() -> None:
    is_failing = bool(_code) or getattr(sys, "last_value", None) is not None
    failures = [_left(saver, is_failing=is_failing) for saver in _open.copy()]
    failure = next(filter(None, failures), None)
    if failure is not None and not is_failing:
        sys.last_value = failure  # later exit handlers look there
        _warn(failure)
        _exit_with(_FAILED)


def _left(ending: OpenSaver, *, is_failing: bool) -> "SaveError | None":
    failure = ending.await_all()
    try:
        return ending.leave(is_failing)
    except Exception:  # noqa: BLE001 - a `finalize` function of the training
        traceback.print_exc()
        return failure


def _warn(failure: "SaveError") -> None:
    warn(f"{failure}; it was the last save, so the exit code is {_FAILED}")


def _exit_noted(code: object = None, /) -> NoReturn:
    """`sys.exit`, which notes the code: exit handlers cannot read it otherwise."""
    global _code  # noqa: PLW0603 - as above
    if threading.current_thread() is threading.main_thread():
        _code = code
    _exit(code)  # type: ignore[arg-type]


def _exit_with(code: int) -> None:
    """Exit with this code instead, after all other exit handlers.

    On Linux, the code of the last call of `exit` counts, also of one by an exit handler of C's.
    """
    library = ctypes.CDLL(None)
    register = library["__cxa_atexit"]
    register(ctypes.cast(library.exit, ctypes.c_void_p), ctypes.c_void_p(code), None)


os.register_at_fork(after_in_child=_open.clear)
