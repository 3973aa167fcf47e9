"""The steps of a round, the lengths of the latest, and the metrics that a script reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from everstep.clock import Clock
from everstep.messages import ReportedValue
from trainer_sdk.page import BadPageError, PageView

_STEPS_MOST = 500
"""The page keeps 512; the oldest of them may be overwritten while it is read."""
_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class StepsMade:
    """Steps that were made since the last record."""

    step: int
    is_first: bool
    steps: int
    steps_s: float


class StepCounter:
    """Counts the steps of one round at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_at = clock.now()
        self._said_step = self._again = 0

    def begins(self) -> None:
        """A round begins."""
        self._said_at = self._clock.now()
        self._said_step = self._again = 0

    def first(self, step: int) -> StepsMade | None:
        """A rank has made its first step of the round."""
        if self._said_step:
            return None
        return self._made(step, is_first=True, steps=1)

    def went_back(self, steps: int) -> None:
        """These steps are made again, and count twice."""
        self._again += steps

    def since(self, step: int | None, *, is_last: bool = False) -> StepsMade | None:
        """The steps to record by now; at the end of a round, all that were not recorded yet."""
        is_due = is_last or self._clock.now() - self._said_at >= _EVERY_S
        if not is_due or step is None or not self._said_step:
            return None
        steps = step - self._said_step + self._again
        return self._made(step, is_first=False, steps=steps) if steps > 0 else None

    def _made(self, step: int, *, is_first: bool, steps: int) -> StepsMade:
        now = self._clock.now()
        took_s, self._said_at, self._said_step = now - self._said_at, now, step
        self._again = 0
        return StepsMade(step, is_first, steps, round(took_s, 6))


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Empty where the script reports nothing."""

    p50_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None
    total: int | None = None
    """The last step of the training."""
    values: tuple[ReportedValue, ...] = ()


NO_FIGURES = StepFigures()


def read_figures(page: PageView, steps: int) -> StepFigures:
    """The figures of the last `steps` steps of a page; none if it is damaged."""
    try:
        reading = page.read()
        # Steps that the agent counts, of scripts without the SDK, have no length.
        took = sorted(filter(None, page.step_durations(min(steps, _STEPS_MOST))))
        values = page.values()
    except BadPageError:
        return NO_FIGURES
    return StepFigures(
        p50_s=_quantile(took, 0.5),
        p99_s=_quantile(took, 0.99),
        max_s=_quantile(took, 1.0),
        total=reading.total_steps or None if reading is not None else None,
        values=tuple(
            ReportedValue(name=name, value=value)
            for name, value in sorted(values.items())
            if isfinite(value)
        ),
    )


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[max(0, ceil(share * len(ordered)) - 1)], 6)
