"""The lengths of a rank's latest steps, and the metrics that its script reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from everstep.messages import ReportedValue
from trainer_sdk.page import BadPageError, PageView

_STEPS_MOST = 500
"""The page keeps 512; the oldest of them may be overwritten while it is read."""


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
