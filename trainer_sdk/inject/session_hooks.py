"""Calls a function at a step or a section of the session, by replacing the session's methods.

The methods are replaced only while a function waits, so that a session stays as fast as before.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainer_sdk.rank_session import Session
from trainer_sdk.sections import Section

_Moment = Literal["before step", "after step", "before section", "in section"]
_Act = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    is_due: Callable[[_Moment, Any], bool]
    act: _Act


_lock = threading.Lock()
_waiting: list[_Waiting] = []
_originals: list[tuple[type, str, Callable[..., Any]]] = []


def before_next(act: _Act) -> None:
    """Call `act` once, before the next step or section begins, in the thread that begins it."""
    _wait(lambda moment, _: moment.startswith("before"), act)


def inside_next(section: str, act: _Act) -> None:
    """Call `act` once, inside the next section of this name, in the thread that has entered it."""
    _wait(lambda moment, this: moment == "in section" and bool(this.name == section), act)


def after_step(number: int, act: _Act) -> None:
    """Call `act` once, after this step or a later one, in the thread that makes the steps."""
    _wait(lambda moment, this: moment == "after step" and bool(this.steps_made >= number), act)


def _wait(is_due: Callable[[_Moment, Any], bool], act: _Act) -> None:
    with _lock:
        _waiting.append(_Waiting(is_due, act))
        if not _originals:
            _replace(Session, ("step",), "before step", "after step")
            _replace(Section, ("__enter__", "enter"), "before section", "in section")


def _replace(owner: type, names: tuple[str, ...], before: _Moment, after: _Moment) -> None:
    original = getattr(owner, names[0])

    def called(this: Any, *args: Any, **kwargs: Any) -> Any:
        _run_due(before, this)
        result = original(this, *args, **kwargs)
        _run_due(after, this)
        return result

    for name in names:
        _originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, called)


def _run_due(moment: _Moment, this: Any) -> None:
    with _lock:
        due = [waiting for waiting in _waiting if waiting.is_due(moment, this)]
        for waiting in due:
            _waiting.remove(waiting)
        if not _waiting:
            while _originals:
                setattr(*_originals.pop())
    for waiting in due:
        waiting.act()
