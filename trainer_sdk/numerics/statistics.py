"""Running statistics of a training's results, and which result they do not expect.

Each value is compared with the median of the values just before it. The distances of the last
window, not the values themselves, say how far a value may be off: so a falling loss, a noisy one
and one with outliers of its own each get a band that fits. Nothing here reads a clock or a device.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Signal = Literal[
    "nan",
    "inf",
    "loss_spike",
    "grad_norm_spike",
    "replicas_differ",
    "restored_loss",
    "results_differ",
]
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)
Series = Literal["loss", "grad_norm"]

_ZERO = -70.0
"""Stands for the logarithm of 0, and of norms that are as good as 0."""


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


class ResultWatch:
    """Looks at the loss and the gradient norm of each step; learns those that are accepted."""

    def __init__(self, limits: ResultLimits | None = None) -> None:
        self._limits = limits or ResultLimits()
        self._loss = _Values(self._limits, least_spread=0.01, is_logarithmic=False)
        # A norm is never negative and moves by factors.
        self._norm = _Values(self._limits, least_spread=0.03, is_logarithmic=True)
        self._rate: float | None = None
        self._settling = 0
        self._restored: _Restored | None = None

    def look(
        self,
        step: int,
        loss: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
    ) -> UnexpectedResult | None:
        """Return what is unexpected of a step's results; it learns nothing."""
        for value in (loss, grad_norm):
            if value is not None and not math.isfinite(value):
                signal: Signal = "nan" if math.isnan(value) else "inf"
                return UnexpectedResult(signal, value, None, None, self._moved_at(step))
        spreads = self._spreads(lr)
        if loss is not None:
            if not self._loss.expects(loss, spreads):
                return self._spike("loss_spike", step, loss, self._loss.band(spreads))
            if self._restored and (shift := self._restored.shift(loss)):
                return UnexpectedResult("restored_loss", *shift, self._restored.first_step(step))
        if grad_norm is not None and not self._norm.expects(grad_norm, spreads):
            return self._spike("grad_norm_spike", step, grad_norm, self._norm.band(spreads))
        return None

    def learn(
        self,
        step: int,
        loss: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
    ) -> None:
        """Add the results of a step that the training keeps."""
        if self._changes(lr):
            self._settling, self._rate = self._limits.settling, lr
        elif self._settling:
            self._settling -= 1
        if self._rate is None:
            self._rate = lr
        if loss is not None and math.isfinite(loss):
            if self._restored and self._restored.add(step, loss):
                self._restored = None
            self._loss.add(step, loss)
        if grad_norm is not None and math.isfinite(grad_norm):
            self._norm.add(step, grad_norm)

    def band(self, name: Series) -> ResultBand | None:
        """Return the values that are expected next; None while there are too few."""
        return self._values(name).band(self._spreads(None))

    @property
    def usual_loss(self) -> float:
        """How large losses are, and how far apart; 0 while there are too few."""
        band = self._loss.band(1.0)
        return max(abs(band.low), abs(band.high)) if band else 0.0

    def state_dict(self) -> dict[str, Any]:
        """The values of the window, for a checkpoint."""
        return {
            "loss": self._loss.state(),
            "grad_norm": self._norm.state(),
            "lr": self._rate,
            "settling": self._settling,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved values; the next losses are compared with them."""
        self._loss.load(state["loss"])
        self._norm.load(state["grad_norm"])
        self._rate = state["lr"]
        self._settling = state["settling"]
        band = self._loss.band(self._limits.restored_spreads)
        self._restored = _Restored(band, self._limits.restored) if band else None

    def _spike(
        self, signal: Signal, step: int, value: float, band: ResultBand | None
    ) -> UnexpectedResult:
        low, high = (band.low, band.high) if band else (None, None)
        return UnexpectedResult(signal, value, low, high, self._moved_at(step))

    def _values(self, name: Series) -> "_Values":
        return self._loss if name == "loss" else self._norm

    def _spreads(self, lr: float | None) -> float:
        is_settling = self._settling or self._changes(lr)
        return self._limits.settling_spreads if is_settling else self._limits.spreads

    def _changes(self, lr: float | None) -> bool:
        if lr is None or self._rate is None or lr == self._rate:
            return False
        low, high = sorted((abs(lr), abs(self._rate)))
        return high > low * self._limits.rate_change

    def _moved_at(self, step: int) -> int:
        return min(self._loss.moved_at(step), self._norm.moved_at(step))


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
        self._measure()

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
        self._measure()

    def _add_distance(self, distance: float) -> None:
        self._distances.append(distance)
        insort(self._sorted, distance)
        if len(self._distances) > self._limits.window:
            del self._sorted[bisect_left(self._sorted, self._distances.popleft())]

    def _measure(self) -> None:
        """Find the center and the spread that the next value is compared with."""
        self._center, self._spread = 0.0, math.inf
        if self._newest:
            self._center = _median(self._newest_sorted)
        if len(self._distances) >= self._limits.warm_up:
            # The standard deviation of normal noise, from the median and from the tail.
            tail = self._sorted[int(0.95 * len(self._sorted))]
            least = self._least_spread * (1.0 if self._is_logarithmic else abs(self._center))
            self._spread = max(1.4826 * _median(self._sorted), tail / 1.96, least)

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


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
