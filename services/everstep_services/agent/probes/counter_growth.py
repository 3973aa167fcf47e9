"""How much a counter has grown within a window, from the notes of earlier looks."""

from dataclasses import dataclass
from itertools import pairwise

_KEPT = 64
"""A window with more looks than this forgets its oldest ones."""

Sample = list[float]
"""The time of a reading and its value; a list, since notes are JSON."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one counter."""

    steps: tuple[float, ...]
    """The growth from each look to the next one within the window."""

    @property
    def total(self) -> float:
        """The growth in the whole window."""
        return sum(self.steps)

    @property
    def last(self) -> float:
        """The growth since the last look."""
        return self.steps[-1] if self.steps else 0.0

    def looks_past(self, limit: float) -> int:
        """The number of looks in which it had grown by more than the limit."""
        return sum(step > limit for step in self.steps)


def note(samples: list[Sample], value: float, *, at: float, window_s: float) -> Growth:
    """Add a reading, forget old ones, and return the growth.

    A counter that went back has begun anew, as after a reset of its device.
    """
    samples.append([at, value])
    begin = at - window_s
    # the newest sample from before the window stays: growth is counted from there
    while len(samples) > 2 and (samples[1][0] <= begin or len(samples) > _KEPT):
        del samples[0]
    values = [value for _, value in samples]
    return Growth(tuple(new - old if new >= old else new for old, new in pairwise(values)))
