"""Data sets that others made, and how right the analyzers are on each.

A module here is a data set: its function `score(folder)` takes the folder with all foreign data and
returns a `DataSet`, several of them, or None if the folder does not have it.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["right", "silent", "wrong", "wrong rank"]
_BINS = 10


@dataclass(frozen=True)
class Answer:
    """The verdict on one case."""

    case: str
    outcome: Outcome
    confidence: float | None = None
    """Of an answer that names a cause."""
    detail: str = ""
    """What was answered, for a person who looks into a mistake."""
    truth: str = ""
    """The class of the truth and that of the answer, where classes are compared."""
    answer: str = ""


@dataclass(frozen=True)
class DataSet:
    """The verdicts on all cases of a data set."""

    name: str
    answers: Sequence[Answer]
    ours: str = ""
    """A figure beyond the counts, such as macro-F1 or an error in percent."""
    published: str = ""
    """The same figure as its authors published it, or that of another tool."""

    def count(self, outcome: Outcome) -> int:
        """The number of cases with this outcome."""
        return sum(answer.outcome == outcome for answer in self.answers)

    def calibration_error(self) -> float | None:
        """The expected calibration error of the answers that name a cause."""
        bins: dict[int, list[float]] = {}
        for answer in self.answers:
            if answer.outcome != "silent" and answer.confidence is not None:
                gap = answer.confidence - (answer.outcome == "right")
                bins.setdefault(min(int(answer.confidence * _BINS), _BINS - 1), []).append(gap)
        given = sum(map(len, bins.values()))
        return sum(abs(sum(gaps)) for gaps in bins.values()) / given if given else None

    def macro_f1(self) -> float:
        """The mean of F1 over the classes of the truth; a silent answer is none."""
        classes = sorted({answer.truth for answer in self.answers})
        return sum(self._f1(name) for name in classes) / len(classes)

    def _f1(self, name: str) -> float:
        there = sum(answer.truth == name for answer in self.answers)
        answered = [
            answer for answer in self.answers
            if answer.answer == name and answer.outcome != "silent"
        ]  # fmt: skip
        right = sum(answer.truth == name for answer in answered)
        return 2 * right / (there + len(answered))


def data_sets(folder: Path) -> Iterator[DataSet]:
    """The scores of all data sets that the folder has."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        scored = importlib.import_module(f"{__name__}.{module.name}").score(folder)
        yield from [scored] if isinstance(scored, DataSet) else scored or ()
