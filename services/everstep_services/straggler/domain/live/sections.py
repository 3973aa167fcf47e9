"""What sections took in a window: a row a rank, a column a section."""

from dataclasses import dataclass

import numpy as np

from everstep_services.straggler.domain.live.windows import Sample
from everstep_services.straggler.domain.operations import Array


@dataclass(frozen=True, slots=True)
class Sections:
    """In seconds; NaN where a rank does not have a section."""

    names: tuple[str, ...]
    numbers: Array
    """Of each column, the number in the vocabulary."""
    medians: Array
    """Of the wall time, each time."""
    wall_s: Array
    """In a step, the longest time left out where there are many."""
    cpu_s: Array
    """In a step."""
    device_s: Array
    """In a step."""


def sections_of(sample: Sample, names: list[object]) -> Sections:
    """The sections of a window as tables."""
    part = sample.sections
    numbers, column = np.unique(part[:, 1].astype(np.int64), return_inverse=True)
    row = part[:, 0].astype(np.int64)
    steps = np.maximum(sample.steps, 1)[row]
    count, total, longest = part[:, 2], part[:, 3], part[:, 4]
    trimmed = np.where(count > 3, (total - longest) / np.maximum(count - 1, 1) * count, total)

    def table(values: Array) -> Array:
        table = np.full((len(sample.rank), len(numbers)), np.nan)
        table[row, column] = values
        return table

    return Sections(
        names=tuple(str(names[int(number)]) for number in numbers),
        numbers=numbers,
        medians=table(part[:, 5]),
        wall_s=table(trimmed / steps),
        cpu_s=table(np.where(part[:, 6] > 0, part[:, 7] / steps, np.nan)),
        device_s=table(np.where(part[:, 8] > 0, part[:, 9] / steps, np.nan)),
    )
