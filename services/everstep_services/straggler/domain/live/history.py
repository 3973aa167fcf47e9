"""The measures of a job's ranks in its last windows, bounded in memory."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from everstep_services.straggler.domain.operations import Array

_MOST_VALUES = 24_000_000
"""Of four bytes each."""
_LEAST = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """One window: each measure by rank, NaN where it is not known."""

    first_step: int
    last_step: int
    measures: Mapping[str, Array]
    sections: Mapping[int, Array]


@dataclass(slots=True)
class WindowHistory:
    """The latest windows, the newest last."""

    windows: deque[Kept] = field(default_factory=deque)
    _values: int = 0

    def add(self, window: Kept, most: int) -> None:
        """Keep one more window, and fewer old ones where ranks are many."""
        self.windows.append(window)
        self._values += _size(window)
        while len(self.windows) > most or (
            self._values > _MOST_VALUES and len(self.windows) > _LEAST
        ):
            self._values -= _size(self.windows.popleft())

    def table(self, measure: str, section: int, windows: int, ranks: slice) -> Array:
        """Windows × ranks, the oldest first."""
        rows = []
        for window in list(self.windows)[-windows:] if windows else []:
            values = window.sections.get(section) if measure == "section" else (
                window.measures.get(measure)
            )  # fmt: skip
            width = len(window.measures["own"][ranks])
            rows.append(np.full(width, np.nan) if values is None else values[ranks])
        return np.array(rows)


def _size(window: Kept) -> int:
    return sum(len(values) for values in (*window.measures.values(), *window.sections.values()))
