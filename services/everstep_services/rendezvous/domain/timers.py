"""Timers of one replica, by its own monotonic clock: started, read and cleared explicitly."""

from typing import Literal

TimerName = Literal[
    "awake",
    "check_asked",
    "check_shared",
    "closed",
    "could_grow",
    "counted",
    "decided",
    "dismissed",
    "enough",
    "extended",
    "form",
    "lived",
    "moving",
    "network_test",
    "observed",
    "phase",
    "planned",
    "recalled",
    "refused",
    "restart",
    "rival",
    "save_ordered",
    "saved",
    "saving",
    "saving_parked",
    "stall_asked",
    "stall_excused",
    "stall_ordered",
    "stalled",
    "stepping",
    "unclaimed",
    "unfit",
]
StartTimes = dict[tuple[object, ...], float]
"""The start of each timer, by its name and its subject."""


class Timers:
    """The timers of a replica during one batch, in which its clock stands still.

    A replica that takes a job over has none: it starts a timer when it first sees the condition
    that the timer measures. So `start` leaves a timer alone that runs already.
    """

    def __init__(self, started: StartTimes, now: float) -> None:
        self._started = started
        self._now = now

    def start(self, name: TimerName, *of: object) -> None:
        """Start a timer, unless it runs."""
        self._started.setdefault((name, *of), self._now)

    def restart(self, name: TimerName, *of: object, ago_s: float = 0.0) -> None:
        """Start a timer again, as of `ago_s` ago."""
        self._started[name, *of] = self._now - ago_s

    def elapsed(self, name: TimerName, *of: object) -> float:
        """Return the seconds since a running timer was started."""
        return self._now - self._started[name, *of]

    def started_at(self, name: TimerName, *of: object) -> float | None:
        """Return when a timer was started, by the replica's clock; None if it does not run."""
        return self._started.get((name, *of))

    def is_running(self, name: TimerName, *of: object) -> bool:
        return (name, *of) in self._started

    def clear(self, name: TimerName, *of: object) -> None:
        """Stop every timer of this name whose subject begins with `of`."""
        prefix = (name, *of)
        for timer in [timer for timer in self._started if timer[: len(prefix)] == prefix]:
            del self._started[timer]
