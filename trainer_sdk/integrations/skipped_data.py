"""Data that a training passes over; knows no framework.

Frameworks count what they have used. Skipped spans count *all* of the data, from the first batch of
the training on, over all epochs, so that they mean the same batches in each round.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Span = tuple[int, int]
"""The first number, and the one after the last."""


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same numbers as spans that neither touch nor overlap, in order."""
    merged_spans: list[Span] = []
    for first, end in sorted(spans):
        if merged_spans and first <= merged_spans[-1][1]:
            merged_spans[-1] = merged_spans[-1][0], max(end, merged_spans[-1][1])
        else:
            merged_spans.append((first, end))
    return tuple(merged_spans)


def number_after(used: int, spans: Sequence[Span]) -> int:
    """The number of what follows when `used` have been used; `spans` are merged."""
    number = used
    for first, end in spans:
        if number >= first:
            number += end - first
    return number


def skipped(first: int, end: int, spans: Sequence[Span]) -> int:
    """How many of the numbers from `first` to before `end` are skipped."""
    return sum(max(0, min(end, last) - max(first, begin)) for begin, last in spans)


def used_before(number: int, spans: Sequence[Span]) -> int:
    """How many have been used when this number is next."""
    return number - skipped(0, number, spans)


class ShortenedSampler:
    """The batches of a batch sampler without those that are skipped.

    `place` returns the number of the pass's first batch, and how many of the pass are already used;
    `per_number` is how many batches share a number.
    """

    def __init__(
        self,
        batches: Any,
        spans: Sequence[Span],
        place: Callable[[], tuple[int, int]],
        per_number: int = 1,
    ) -> None:
        self.batches = batches
        self._spans = spans
        self._place = place
        self._per_number = per_number

    def __iter__(self) -> Iterator[Any]:
        first, used = self._place()
        start = number_after(used_before(first, self._spans) + used, self._spans)
        for index, batch in enumerate(self.batches):
            number = first + index // self._per_number
            if number >= start and not skipped(number, number + 1, self._spans):
                yield batch

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def shorten(loader: Any, make: Callable[[Any], ShortenedSampler]) -> bool:
    """Have a loader take its batches from `make(batch_sampler)`; False if it has none."""
    loader = getattr(loader, "base_dataloader", loader)
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return False
    if isinstance(batches, ShortenedSampler):
        batches = batches.batches  # of an earlier training
    # Torch lets nobody replace it, since a loader would not notice; this one passes all on.
    object.__setattr__(loader, "batch_sampler", make(batches))
    return True
