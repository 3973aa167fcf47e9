"""The signals for ranks, each delivered once even if it was sent to all processes of a job."""

import signal
from collections.abc import Iterator
from typing import Protocol

from everstep_services.agent.ranks import process_tree
from trainer_sdk import layout
from trainer_sdk.bootstrap.deferred_signals import DEFERRED, HELD
from trainer_sdk.wire import Signal, Undefer

_TO_ALL = frozenset((*HELD, signal.SIGQUIT))
_SETTLES_S = 0.3
"""A sender that signals all processes of a step has reached all of them within this time."""
_NEAR_S = 2.0
"""Two signals with one number within this time are one."""


class _Send(Protocol):
    def __call__(self, line: Signal, /, *, has_come: bool) -> tuple[int, ...]: ...


class SignalQueue:
    """Waits a moment before it passes on a signal that may have been sent to all processes.

    The warden blocks these signals: one that was sent to the warden is pending, and was sent to
    the ranks, too. They are in sessions of their own, so that no terminal reaches them.
    """

    def __init__(self, send: _Send) -> None:
        self._send = send
        self._seen: dict[int, float] = {}
        self._waiting: list[tuple[float, Signal | Undefer]] = []

    @property
    def next_at(self) -> float | None:
        """When to call `due`."""
        return min((at for at, _ in self._waiting), default=None)

    def hear(self, line: Signal | Undefer, now: float) -> None:
        """The agent orders this signal."""
        waits_s = _SETTLES_S if line.number in _TO_ALL else 0.0
        self._waiting.append((now + waits_s, line))

    def due(self, now: float) -> Iterator[tuple[int, ...]]:
        """Send the signals that have waited long enough; yield the ranks without a handler."""
        ready = [(at, line) for at, line in self._waiting if at <= now]
        if not ready:
            return
        self._seen.update(dict.fromkeys(_pending(), now))
        self._waiting = [(at, line) for at, line in self._waiting if at > now]
        for at, line in ready:
            seen = self._seen.get(line.number)
            has_come = seen is not None and seen >= at - _SETTLES_S - _NEAR_S
            if isinstance(line, Signal):
                yield self._send(line, has_come=has_come)
            elif not has_come:
                self._send(Signal(number=line.number, ranks=(line.rank,)), has_come=False)


def _pending() -> Iterator[int]:
    """The blocked signals that were sent to this process."""
    while (info := signal.sigtimedwait(_TO_ALL, 0)) is not None:
        yield info.si_signo


# A rank without a handler for these would die of them, which no sender intends.
ANNOUNCE = (signal.SIGUSR1, signal.SIGUSR2)
_WORDS = 8 * (layout.DEFERRED + 1)


def is_deferred(pid: int, number: int, page: str, *, is_armed_first: bool) -> bool:
    """Whether the rank has neither its own handler for this signal nor the default action.

    `is_armed_first`: it runs through the bootstrap, and has no handler of its own before its
    script.
    """
    if number not in DEFERRED:
        return False
    words = _words(page)
    if words is None or words[layout.MAGIC_AT] != layout.MAGIC:
        return is_armed_first
    if words[layout.PID] != pid:
        return False
    if words[layout.PHASE] == layout.PHASE_STARTING:
        return is_armed_first
    return bool(words[layout.DEFERRED] >> number & 1) and process_tree.catches(pid, number)


def _words(page: str) -> "memoryview[int] | None":
    try:
        with open(page, "rb") as file:
            octets = file.read(_WORDS)
    except OSError:
        return None
    return memoryview(octets).cast("q") if len(octets) == _WORDS else None
