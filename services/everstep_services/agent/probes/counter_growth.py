"""How much a counter has grown within a window, from what earlier looks have noted."""

from dataclasses import dataclass
from itertools import pairwise

_KEPT = 64
"""A window with more looks than this forgets its oldest ones."""

Sample = list[float]
"""When it was read, and what it said; a list, since notes are JSON."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What the samples of one counter say."""

    steps: tuple[float, ...]
    """By how much it grew from each look to the next one within the window."""

    @property
    def total(self) -> float:
        """In the whole window."""
        return sum(self.steps)

    @property
    def last(self) -> float:
        """Since the look before this one."""
        return self.steps[-1] if self.steps else 0.0

    def looks_past(self, limit: float) -> int:
        """In how many looks it had grown by more than the limit."""
        return sum(step > limit for step in self.steps)


def note(samples: list[Sample], value: float, *, at: float, window_s: float) -> Growth:
    """Add what was read now, forget what is too old, and say how it has grown.

    A counter that went back has begun anew, as after a reset of its device.
    """
    samples.append([at, value])
    begin = at - window_s
    # The newest sample from before the window stays: growth is counted from there.
    while len(samples) > 2 and (samples[1][0] <= begin or len(samples) > _KEPT):
        del samples[0]
    values = [value for _, value in samples]
    return Growth(tuple(new - old if new >= old else new for old, new in pairwise(values)))
