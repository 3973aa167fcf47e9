"""Defers signals that a scheduler sends to every process of a step, until the agent has decided.

Slurm and systemd signal the ranks together with their agent. By default such a signal would end
a rank before the agent can have it save. A handler of the script stays in place; a script without
one sees the default action in `signal.getsignal`, and its child processes have the default action.

The page names the signals that are deferred. The warden ends a rank by such a signal only if the
agent orders it, or if only the rank has received the signal.
"""

import _signal  # type: ignore[import-not-found]  # `signal` imports more than all of this
import os
from _thread import get_ident

from trainer_sdk import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from trainer_sdk.bootstrap.agent_link import AgentLink

DEFERRED = (_signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2)
HELD = (*DEFERRED, _signal.SIGINT)
"""Blocked in a rank from its fork until its bootstrap has deferred them."""

_set, _get = _signal.signal, _signal.getsignal
_link: "AgentLink | None" = None
_masks: "dict[int, Any]" = {}
"""The signal mask of each forking thread before its fork."""
_held: "set[int]" = set()
"""Threads whose next child keeps the signals blocked."""


def defer(link: "AgentLink") -> None:
    """Defer the signals that would end this process, and unblock those held since its fork.

    Called only in the main thread, before the script runs.
    """
    global _link  # noqa: PLW0603 - a process has one
    if link.attached:
        _link = link
        for number in DEFERRED:
            if _get(number) == _signal.SIG_DFL:
                _defer(number)
        _signal.signal, _signal.getsignal = _signal_set, _signal_seen
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork, after_in_child=_end_in_child
        )
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, HELD)


def forking(fork: "Callable[[], None]") -> None:
    """Call `fork`; its child keeps deferred signals blocked until it ignores them."""
    _held.add(get_ident())
    try:
        fork()
    finally:
        _held.discard(get_ident())


def is_held() -> bool:
    """Whether this process is a child of `forking`, or this thread is calling it."""
    return get_ident() in _held


def ignore_in_child() -> None:
    """In a child of the rank: ignore signals that go to all processes of the step."""
    for number in DEFERRED:
        _set(number, _do_nothing)
        _signal.siginterrupt(number, False)  # noqa: FBT003 - positional only
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, DEFERRED)


def _defer(number: int) -> None:
    _set(number, _report_signal)
    _signal.siginterrupt(number, False)  # noqa: FBT003 - positional only
    _mark(number, is_deferred=True)


def _report_signal(number: int, _: object) -> None:
    if _link is not None:
        _link.send("deferred", f'"number":{number}')


def _do_nothing(*_: object) -> None:
    pass


def _signal_set(number: "Any", handler: "Any", /) -> "Any":
    """`signal.signal`; to set the default action of such a signal defers it again."""
    before = _set(number, handler)
    if number in DEFERRED:
        if isinstance(handler, int) and handler == _signal.SIG_DFL:
            _defer(number)
        else:
            _mark(number, is_deferred=False)
    return _signal.SIG_DFL if before is _report_signal else before


def _signal_seen(number: "Any", /) -> "Any":
    """`signal.getsignal`, which shows a deferred signal with its default action."""
    seen = _get(number)
    return _signal.SIG_DFL if seen is _report_signal else seen


def _mark(number: int, *, is_deferred: bool) -> None:
    if _link is None:
        return
    others = _link.words[layout.DEFERRED] & ~(1 << number)
    _link.words[layout.DEFERRED] = others | is_deferred << number


def _before_fork() -> None:
    """Block the signals, so that none reaches the child before it has its own handlers."""
    if _link is not None:
        _masks[get_ident()] = _signal.pthread_sigmask(_signal.SIG_BLOCK, DEFERRED)


def _after_fork() -> None:
    mask = _masks.pop(get_ident(), None)
    if mask is not None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)


def _end_in_child() -> None:
    """In a process that the script forks, which is not a rank: restore the default actions."""
    global _link  # noqa: PLW0603 - as above
    _link = None
    _signal.signal, _signal.getsignal = _set, _get
    for number in DEFERRED:
        if _get(number) is _report_signal:
            _set(number, _signal.SIG_DFL)
    if not is_held():
        _after_fork()
