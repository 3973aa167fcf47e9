"""A whole job that became slower or faster, though no rank stands out."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from everstep_services.straggler.domain.arrays import finite_median
from everstep_services.straggler.domain.changes import StepsShifted

_WINDOWS = 3
"""This many windows in a row make a change."""
_LEAST = 5
"""At least this many earlier windows define the usual step."""
_KEPT = 30
_NOISE = 5.0
"""And this many standard deviations of a window."""
_TRIPS, _LEAST_TRIP_S = 3.0, 0.001
"""The network is slower from this multiple of the usual round trips, and this increase, on."""


@dataclass(frozen=True, slots=True)
class _Seen:
    first_step: int
    step_s: float
    sections: Mapping[str, float]
    trip_s: float


@dataclass(slots=True)
class Steps:
    """The lengths of a job's steps in a round, window by window."""

    round: int
    usual: deque[_Seen] = field(default_factory=lambda: deque(maxlen=_KEPT))
    recent: deque[_Seen] = field(default_factory=lambda: deque(maxlen=_WINDOWS))

    def add(
        self,
        first_step: int,
        step_s: float,
        sections: Mapping[str, float],
        trip_s: float,
        ratio: float,
    ) -> StepsShifted | None:
        """Take in a window in which no rank stands out, with the longest of the nodes' round trips.

        Returns a change, once.
        """
        if not step_s > 0:
            return None
        if len(self.recent) == _WINDOWS:
            self.usual.append(self.recent[0])
        self.recent.append(_Seen(first_step, step_s, sections, trip_s))
        if len(self.usual) < _LEAST or len(self.recent) < _WINDOWS:
            return None
        shift = self._shift(ratio)
        if shift is not None:
            self.usual.clear()
        return shift

    def forget(self) -> None:
        """Forget recent windows: while a rank is slow, they do not describe the whole job."""
        self.recent.clear()

    def _shift(self, ratio: float) -> StepsShifted | None:
        before = np.array([window.step_s for window in self.usual])
        middle = float(np.median(before))
        noise = 1.4826 * float(np.median(np.abs(before - middle)))
        now = np.array([window.step_s for window in self.recent])
        limit = max(ratio * middle, _NOISE * noise)
        apart = now - middle
        if not (apart > limit).all() and not (apart < -limit).all():
            return None
        now_s = float(np.median(now))
        section, words = self._section(now_s - middle)
        reason = (
            f"steps take {now_s * 1e3:.1f} ms instead of {middle * 1e3:.1f} ms for "
            f"{_WINDOWS} windows (limit {limit * 1e3:.1f} ms: {ratio * 100:g} % or "
            f"{_NOISE:g} times the noise of {noise * 1e3:.2f} ms), and no rank stands out{words}"
            f"{self._trips()}"
        )
        first = self.recent[0].first_step
        return StepsShifted(self.round, middle, now_s, first, reason, section)

    def _trips(self) -> str:
        """Whether the network changed, too, in words."""
        before, now = (
            finite_median([window.trip_s for window in seen]) for seen in (self.usual, self.recent)
        )
        if not now > max(_TRIPS * before, before + _LEAST_TRIP_S):
            return ""
        return (
            f"; round trips of connections are {now * 1e3:.1f} ms instead of {before * 1e3:.1f} "
            f"ms on the node where they are the longest: the network, not a single node"
        )

    def _section(self, change: float) -> tuple[str | None, str]:
        """The section that most of the change is in."""
        names = set(self.recent[-1].sections)
        changes = {
            name: finite_median([window.sections.get(name) for window in self.recent])
            - finite_median([window.sections.get(name) for window in self.usual])
            for name in names
        }
        finite = {name: value for name, value in changes.items() if np.isfinite(value)}
        if not finite:
            return None, ""
        name = max(finite, key=lambda section: finite[section] * np.sign(change))
        if finite[name] / change < 0.3:
            return None, "; no section changed as much"
        return name, f"; section {name} changed by {finite[name] * 1e3:+.1f} ms a step"
