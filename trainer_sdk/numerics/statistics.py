"""Running statistics of a training's results, and which result they do not expect.

Each value is compared with the median of the values just before it. The distances of the last
window, not the values themselves, say how far a value may be off: so a falling loss, a noisy one
and one with outliers of its own each get a band that fits. Nothing here reads a clock or a device.

A look at a value within the band must cost next to nothing. So a few values are learned together,
and until then each is compared with limits that no such few values can make too wide.
"""

import math
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal, get_args

Signal = Literal[
    "nan",
    "inf",
    "loss_spike",
    "grad_norm_spike",
    "output_spike",
    "replicas_differ",
    "restored_loss",
    "results_differ",
]
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)
Series = Literal["loss", "grad_norm", "output"]
_SPIKES: Final[dict[Series, Signal]] = {
    "loss": "loss_spike",
    "grad_norm": "grad_norm_spike",
    "output": "output_spike",
}
_StepValues = tuple[float | None, float | None, float | None]
"""In the order of the series."""
_Limits = tuple[float, float]
_NONE: Final[_Limits] = (math.inf, -math.inf)
_ALL: Final[_Limits] = (-sys.float_info.max, sys.float_info.max)
"""Limits that no value is within, and all that are finite."""

_ZERO = -70.0
"""Stands for the logarithm of 0, and of norms that are as good as 0."""
_NO_VALUES: Final = {"steps": (), "newest": (), "distances": ()}
_ROUNDING = 1e-9
"""Of logarithms and powers."""


@dataclass(frozen=True, slots=True)
class UnexpectedResult:
    """What a step computed, and what was expected of it."""

    signal: Signal
    value: float
    low: float | None
    high: float | None
    moved_at: int
    """The step since which the statistic moves; at most the step of the value."""


@dataclass(frozen=True, slots=True)
class ResultBand:
    """The values that are expected next."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ResultLimits:
    """How many values are kept, and how far the next one may be off."""

    window: int = 256
    """The number of distances whose spread is the unit of `spreads`."""
    center: int = 16
    """The number of newest values whose median is expected next."""
    warm_up: int = 48
    """The number of values before any is called a spike."""
    spreads: float = 12.0
    settling: int = 64
    """After a change of the learning rate, the number of values with a wider band."""
    settling_spreads: float = 48.0
    rate_change: float = 1.2
    """The learning rate's change, as a factor, that widens the band."""
    restored: int = 8
    """After a restore, the number of losses whose median is compared with the saved one."""
    restored_spreads: float = 4.0
    moving_spreads: float = 4.0
    """From here on a value counts as moving, if the ones after it do."""
    ahead: int = 7
    """How many values may wait until they are learned together."""


class ResultWatch:
    """Looks at the results of each step; learns those that are accepted.

    They are the loss, the norm of the gradients, and the norm of what the model returned.
    """

    def __init__(self, limits: ResultLimits | None = None) -> None:
        self._limits = limits or ResultLimits()
        # A norm is never negative and moves by factors.
        self._series: dict[Series, _Values] = {
            "loss": _Values(self._limits, least_spread=0.01, is_logarithmic=False),
            "grad_norm": _Values(self._limits, least_spread=0.03, is_logarithmic=True),
            "output": _Values(self._limits, least_spread=0.03, is_logarithmic=True),
        }
        self._rate: float | None = None
        self._settling = 0
        self._restored: _Restored | None = None
        self._waiting: list[tuple[int, float | None, _StepValues]] = []
        """What was accepted and is not learned yet: at most `ahead` steps."""
        self._sure: tuple[float, ...] = ()
        """The lower and the upper limit of each series, for surely expected values."""
        self._measure()

    def look(
        self,
        step: int,
        loss: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
        output: float | None = None,
    ) -> UnexpectedResult | None:
        """Return what is unexpected of a step's results; it learns nothing."""
        low, high, low_norm, high_norm, low_output, high_output = self._sure
        if (
            (loss is None or low <= loss <= high)
            and (grad_norm is None or low_norm <= grad_norm <= high_norm)
            and (output is None or low_output <= output <= high_output)
        ):
            return None
        self._learn_waiting()
        values = (loss, grad_norm, output)
        for value in values:
            if value is not None and not math.isfinite(value):
                signal: Signal = "nan" if math.isnan(value) else "inf"
                return UnexpectedResult(signal, value, None, None, self._moved_at(step))
        return self._spike(step, values, self._spreads(lr))

    def learn(
        self,
        step: int,
        loss: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
        output: float | None = None,
    ) -> None:
        """Add the results of a step that the training keeps."""
        self._waiting.append((step, lr, (loss, grad_norm, output)))
        if len(self._waiting) > self._limits.ahead:
            self._learn_waiting()

    def _learn_waiting(self) -> None:
        if self._waiting:
            for step, lr, values in self._waiting:
                self._learn(step, lr, values)
            self._waiting.clear()
            self._measure()

    def _learn(self, step: int, lr: float | None, values: _StepValues) -> None:
        if self._changes(lr):
            self._settling, self._rate = self._limits.settling, lr
        elif self._settling:
            self._settling -= 1
        if self._rate is None:
            self._rate = lr
        for (name, series), value in zip(self._series.items(), values, strict=True):
            if value is not None and math.isfinite(value):
                if name == "loss" and self._restored and self._restored.add(step, value):
                    self._restored = None
                series.add(step, value)

    def _measure(self) -> None:
        sure = [values.measured() for values in self._series.values()]
        if self._restored:
            sure[0] = _NONE
        self._sure = tuple(chain.from_iterable(sure))

    def band(self, name: Series) -> ResultBand | None:
        """Return the values that are expected next; None while there are too few."""
        self._learn_waiting()
        return self._series[name].band(self._spreads(None))

    @property
    def usual_loss(self) -> float:
        """How large losses are, and how far apart; 0 while there are too few."""
        self._learn_waiting()
        band = self._series["loss"].band(1.0)
        return max(abs(band.low), abs(band.high)) if band else 0.0

    def state_dict(self) -> dict[str, Any]:
        """The values of the window, for a checkpoint."""
        self._learn_waiting()
        state: dict[str, Any] = {name: values.state() for name, values in self._series.items()}
        return {**state, "lr": self._rate, "settling": self._settling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved values; the next losses are compared with them."""
        self._waiting.clear()
        for name, values in self._series.items():
            values.load(state.get(name, _NO_VALUES))  # an older release has no outputs
        self._rate = state["lr"]
        self._settling = state["settling"]
        self._measure()
        band = self._series["loss"].band(self._limits.restored_spreads)
        self._restored = _Restored(band, self._limits.restored) if band else None
        self._measure()

    def _spike(self, step: int, values: _StepValues, spreads: float) -> UnexpectedResult | None:
        for (name, series), value in zip(self._series.items(), values, strict=True):
            if value is None:
                continue
            if not series.expects(value, spreads):
                band = series.band(spreads)
                low, high = (band.low, band.high) if band else (None, None)
                return UnexpectedResult(_SPIKES[name], value, low, high, self._moved_at(step))
            if name == "loss" and self._restored and (shift := self._restored.shift(value)):
                return UnexpectedResult("restored_loss", *shift, self._restored.first_step(step))
        return None

    def _spreads(self, lr: float | None) -> float:
        is_settling = self._settling or self._changes(lr)
        return self._limits.settling_spreads if is_settling else self._limits.spreads

    def _changes(self, lr: float | None) -> bool:
        if lr is None or self._rate is None or lr == self._rate:
            return False
        low, high = sorted((abs(lr), abs(self._rate)))
        return high > low * self._limits.rate_change

    def _moved_at(self, step: int) -> int:
        return min(values.moved_at(step) for values in self._series.values())


class _Values:
    """The last values of a series, and how far each was from the median before it."""

    def __init__(self, limits: ResultLimits, *, least_spread: float, is_logarithmic: bool) -> None:
        self._limits = limits
        self._least_spread = least_spread
        self._is_logarithmic = is_logarithmic
        self._steps: deque[int] = deque(maxlen=limits.center)
        self._newest: deque[float] = deque(maxlen=limits.center)
        self._newest_sorted: list[float] = []
        self._distances: deque[float] = deque()
        self._sorted: list[float] = []
        self._center = 0.0
        self._spread = math.inf
        """Infinite while there are too few values."""

    def add(self, step: int, value: float) -> None:
        value = self._scaled(value)
        if self._newest:
            self._add_distance(abs(value - self._center))
            if len(self._newest) == self._limits.center:
                del self._newest_sorted[bisect_left(self._newest_sorted, self._newest[0])]
        self._steps.append(step)
        self._newest.append(value)
        insort(self._newest_sorted, value)
        self._center = _median(self._newest_sorted)

    def expects(self, value: float, spreads: float) -> bool:
        """Whether the value is in the band; any is while there are too few."""
        return abs(self._scaled(value) - self._center) <= spreads * self._spread

    def band(self, spreads: float) -> ResultBand | None:
        if self._spread == math.inf:
            return None
        width = spreads * self._spread
        exponents = (self._center, self._center - width, self._center + width)
        if not self._is_logarithmic:
            return ResultBand(*exponents)
        return ResultBand(*(_exponential(exponent) for exponent in exponents))

    def moved_at(self, step: int) -> int:
        """Return the first step of those that moved away together and have not come back."""
        least = self._limits.moving_spreads * self._spread
        for earlier, value in zip(reversed(self._steps), reversed(self._newest), strict=True):
            if abs(value - self._center) <= least:
                break
            step = earlier
        return step

    def state(self) -> dict[str, Any]:
        return {
            "steps": list(self._steps),
            "newest": list(self._newest),
            "distances": list(self._distances),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._steps.clear()
        self._steps.extend(state["steps"])
        self._newest.clear()
        self._newest.extend(state["newest"])
        self._newest_sorted = sorted(self._newest)
        self._distances.clear()
        self._sorted.clear()
        for distance in state["distances"]:
            self._add_distance(distance)
        self._center = _median(self._newest_sorted) if self._newest else 0.0

    def _add_distance(self, distance: float) -> None:
        self._distances.append(distance)
        insort(self._sorted, distance)
        if len(self._distances) > self._limits.window:
            del self._sorted[bisect_left(self._sorted, self._distances.popleft())]

    def measured(self) -> _Limits:
        """Find the spread; return the limits of values that are expected whatever comes before.

        `ahead` values move a median, or a quantile, by as many places at most.
        """
        self._spread = math.inf
        ahead = self._limits.ahead
        if len(self._sorted) < self._limits.warm_up:
            return _ALL if len(self._sorted) + ahead < self._limits.warm_up else _NONE
        self._spread = self._spread_of(abs(self._center), 0)
        if min(len(self._newest_sorted), len(self._sorted)) <= 2 * ahead:
            return _NONE
        first, last = (_median(self._newest_sorted, shift) for shift in (-ahead, ahead))
        least = min(abs(first), abs(last)) if first * last > 0 else 0.0
        width = self._limits.spreads * self._spread_of(least, -ahead)
        low, high = last - width, first + width
        if not self._is_logarithmic:
            return low, high
        return _exponential(low) * (1 + _ROUNDING), _exponential(high) * (1 - _ROUNDING)

    def _spread_of(self, center: float, shift: int) -> float:
        """The standard deviation of normal noise, from the median and from the tail."""
        tail = self._sorted[int(0.95 * len(self._sorted)) + shift]
        least = self._least_spread * (1.0 if self._is_logarithmic else center)
        return max(1.4826 * _median(self._sorted, shift), tail / 1.96, least)

    def _scaled(self, value: float) -> float:
        if not self._is_logarithmic:
            return value
        return max(math.log(value), _ZERO) if value > 0 else _ZERO


class _Restored:
    """The first losses after a restore, next to what was saved."""

    def __init__(self, saved: ResultBand, count: int) -> None:
        self._saved = saved
        self._count = count
        self._steps: list[int] = []
        self._losses: list[float] = []

    def shift(self, loss: float) -> tuple[float, float, float] | None:
        """Return the median and its limits, once there are enough losses and it is outside."""
        if len(self._losses) + 1 < self._count:
            return None
        median = _median(sorted([*self._losses, loss]))
        low, high = self._saved.low, self._saved.high
        return None if low <= median <= high else (median, low, high)

    def first_step(self, step: int) -> int:
        return self._steps[0] if self._steps else step

    def add(self, step: int, loss: float) -> bool:
        """Return whether all losses have been compared."""
        self._steps.append(step)
        self._losses.append(loss)
        return len(self._losses) >= self._count


def _exponential(exponent: float) -> float:
    return math.exp(min(exponent, 700.0)) if exponent > _ZERO else 0.0


def _median(ordered: Sequence[float], shift: int = 0) -> float:
    """The median, or the value this number of places after it."""
    middle = len(ordered) // 2 + shift
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
