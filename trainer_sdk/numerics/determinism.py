"""Counts which results of a step differ when the step is run again, and by how much."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer_sdk.numerics.events import CountedEvent, ResultCount
from trainer_sdk.numerics.judgement import RankResults, StepResult, relative_difference


@dataclass(slots=True)
class ResultVariation:
    """How often a result was compared, and how often it differed."""

    compared: int = 0
    different: int = 0
    largest: float | None = None
    """The largest relative difference of numbers; None for hashes."""

    def add(self, first: float, again: float) -> None:
        """Count a number; NaN is equal to NaN."""
        self.compared += 1
        difference = relative_difference(first, again)
        self.different += difference > 0
        if math.isfinite(difference):
            self.largest = max(self.largest or 0.0, difference)

    def add_hash(self, first: int, again: int) -> None:
        """Count a hash of gradients."""
        self.compared += 1
        self.different += first != again


class DeterminismCounts:
    """The variations of the loss, of the gradient norm, and of the gradients of each group."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._groups = groups
        self.again = 0
        self.variations: dict[str, ResultVariation] = {}

    def add(self, results: Sequence[RankResults]) -> None:
        """Count a step that was run again on all ranks."""
        self.again += 1
        for result in results:
            for again in result.again[:1]:
                self._compare(result.first, again)

    def event(self, steps: int) -> CountedEvent:
        """What is reported of it after this number of steps."""
        results = tuple(
            ResultCount(
                name=name,
                compared=count.compared,
                different=count.different,
                largest=count.largest,
            )
            for name, count in self.variations.items()
        )
        return CountedEvent(steps=steps, again=self.again, results=results)

    def _compare(self, first: StepResult, again: StepResult) -> None:
        self._variation("loss").add(first.loss, again.loss)
        if first.norm is not None and again.norm is not None:
            self._variation("grad_norm").add(first.norm, again.norm)
        for name, *hashes in zip(self._groups, first.hashes, again.hashes, strict=False):
            self._variation(name).add_hash(*hashes)

    def _variation(self, name: str) -> ResultVariation:
        return self.variations.setdefault(name, ResultVariation())
