"""Computes how often to save. Pure: steps and times are the input, the decision is the output.

`auto` is the interval of Young and Daly, which balances the cost of saves against the work that a
failure loses. The cost of a save is its stall, and the slowdown of steps while it is written.
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from trainer_sdk.checkpoint.arguments import whole

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h)")
_NEWER = 0.2
"""The weight of the latest step or save in a mean."""
_CHANGED, _CHANGED_OFTEN = 0.1, 0.5
"""A smaller change is not reported; an interval that follows each write changes often."""
_AGAIN = 0.1
"""After this share of a write, ask again whether it is over."""
_PRIOR_S = 24 * 3600.0
"""The assumed time between failures, before the job has failed."""


@dataclass(frozen=True, slots=True)
class Every:
    """The user's choice: a number of steps, or of seconds, or `always`; otherwise it is `auto`."""

    steps: int | None = None
    seconds: float | None = None
    most_share: float | None = None
    """For `always`: the share of the training's time that saves may cost."""


@dataclass(frozen=True, slots=True)
class IntervalBounds:
    """The bounds of an automatic interval."""

    least_s: float = 30.0
    most_s: float = 3600.0


class SaveDecision(msgspec.Struct, frozen=True):
    """Rank 0's decision, which all ranks follow."""

    is_due: bool
    next_step: int
    """No rank needs to ask before this step."""
    step: int
    """The step that rank 0 has finished."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The chosen interval, and why; the fields of the fact `IntervalChosen`."""

    every_steps: int
    every_s: float
    reason: str
    stall_s: float | None = None
    mtbf_s: float | None = None


def parse_every(every: int | str, max_overhead: float = 0.01) -> Every:
    """Parse 500, "10min", "90s", "2h", "auto" or "always"."""
    if isinstance(every, str) and every in ("auto", "always"):
        return Every(most_share=max_overhead if every == "always" else None)
    with suppress(TypeError, ValueError):
        return Every(steps=whole("every", every, 1))
    match = _TIME.fullmatch(every.strip()) if isinstance(every, str) else None
    if match is None or not float(match[1]):
        raise ValueError(
            f"every={every!r} is not an interval: give a number of steps, a time as '10min', '90s' "
            "or '2h', 'auto' or 'always'"
        )
    return Every(seconds=float(match[1]) * _UNITS[match[2]])


def mtbf_s(failures: int, ran_s: float) -> float:
    """The mean time between failures of the job, with one assumed failure a day before it."""
    return (_PRIOR_S + ran_s) / (1 + failures)


def best_interval_s(cost_s: float, mtbf: float) -> float:
    """The interval that loses the least time, by Daly's formula, which refines Young's."""
    if cost_s >= 2 * mtbf:
        return mtbf
    ratio = cost_s / (2 * mtbf)
    return math.sqrt(2 * cost_s * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


class IntervalEstimate:
    """The interval that follows from rank 0's measurements."""

    def __init__(
        self, every: Every, bounds: IntervalBounds, *, failures: int, ran_s: float
    ) -> None:
        self._every = every
        self._bounds = bounds
        self._failures = failures
        self._ran_s = ran_s
        self._began: float | None = None
        self._last_save: float | None = None
        self._stepped: float | None = None
        self._steps = 0
        self._quiet_step_s: float | None = None
        self._stall_s: float | None = None
        self._slowdown_s: float | None = None
        self._drain_s = 0.0
        self._draining = (0.0, 0.0)
        self._is_saving = False
        self._reported: Interval | None = None

    def stepped(self, now: float, *, is_saving: bool) -> None:
        """Note a finished step; `is_saving` if the last save was being written in a part of it."""
        before, self._stepped = self._stepped, now
        self._is_saving = is_saving
        if before is None:
            self._began = self._last_save = now
            return
        self._steps += 1
        took = now - before
        if not is_saving:
            self._quiet_step_s = _mean(self._quiet_step_s, took)
            return
        slower, lasted = self._draining
        extra = took - self._quiet_step_s if self._quiet_step_s is not None else 0.0
        self._draining = slower + extra, lasted + took

    def saved(self, now: float, stall_s: float) -> None:
        """Note a save that was begun, and the training's time that it took."""
        slower, lasted = self._draining
        if self._stall_s is not None:
            self._slowdown_s = _mean(self._slowdown_s, max(0.0, slower))
            self._drain_s = max(lasted, self._drain_s * (1 - _NEWER))
        self._draining = 0.0, 0.0
        self._stall_s = _mean(self._stall_s, stall_s)
        self._last_save = self._stepped = now

    def look(self, step: int, now: float) -> SaveDecision:
        """Whether to save after this step, and the step at which to ask again."""
        step_s = self._quiet_step_s
        if step_s is None or self._last_save is None:
            return SaveDecision(is_due=False, next_step=step + 1, step=step)
        wanted_s = self.interval(now).every_s
        left_s = wanted_s - (now - self._last_save)
        waits = self._every.most_share is not None and self._is_saving
        if waits:
            left_s = max(left_s, _AGAIN * self._drain_s)
        is_due = left_s < step_s / 2 and not waits
        ahead = int((wanted_s if is_due else left_s) / step_s)
        # A step time from few steps is not extrapolated to many.
        next_step = step + max(1, min(ahead, self._steps))
        return SaveDecision(is_due=is_due, next_step=next_step, step=step)

    def interval(self, now: float) -> Interval:
        """The interval by the present measurements."""
        step_s = self._quiet_step_s or 0.0
        if self._every.seconds is not None:
            return _interval(self._every.seconds, step_s, "as configured")
        slowdown_s = self._slowdown_s or 0.0
        cost_s = (self._stall_s or 0.0) + slowdown_s
        if self._every.most_share is not None:
            every_s = cost_s / self._every.most_share
            reason = (
                f"each save begins when the last one is durable, and costs {cost_s:.3g} s; "
                f"max_overhead={self._every.most_share:g} allows one in {every_s:.3g} s"
            )
            return _interval(max(every_s, self._drain_s), step_s, reason, self._stall_s)
        mtbf = mtbf_s(self._failures, self._ran_s + now - (self._began or now))
        if self._stall_s is None:
            reason = "no save has been measured yet, so it is the least"
            return _interval(self._bounds.least_s, step_s, reason, mtbf=mtbf)
        best_s = best_interval_s(cost_s, mtbf)
        least_s = max(self._bounds.least_s, 2 * self._drain_s)
        every_s = min(max(best_s, least_s), max(self._bounds.most_s, least_s))
        reason = (
            f"a save costs {cost_s:.3g} s ({self._stall_s:.3g} s stall, {slowdown_s:.3g} s "
            f"slower steps while it is written), and the job fails every {mtbf / 3600:.3g} h "
            f"({self._failures} failures, and one a day before): {best_s:.4g} s is the best"
        )
        if every_s != best_s:
            reason += f", and {every_s:.4g} s the nearest allowed"
        return _interval(every_s, step_s, reason, self._stall_s, mtbf)

    def news(self, now: float) -> Interval | None:
        """The interval, if it has changed since the last report."""
        interval, reported = self.interval(now), self._reported
        least = _CHANGED if self._every.most_share is None else _CHANGED_OFTEN
        if (
            reported is not None
            and abs(interval.every_s - reported.every_s) <= least * reported.every_s
        ):
            return None
        self._reported = interval
        return interval


def _interval(
    every_s: float,
    step_s: float,
    reason: str,
    stall: float | None = None,
    mtbf: float | None = None,
) -> Interval:
    steps = max(1, round(every_s / step_s)) if step_s else 1
    return Interval(steps, every_s, reason, stall, mtbf)


def _mean(before: float | None, latest: float) -> float:
    return latest if before is None else before + _NEWER * (latest - before)
