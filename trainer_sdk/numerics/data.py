"""The batches of a training, so that a step can be made again and data can be passed over.

The position is that of a `PositionedSampler`, in samples of all ranks, or the number of batches
that a loader in `PerRank` has given on each rank. Other iterables have none: their batches can be
given again, and not passed over.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from trainer_sdk.checkpoint.data import PerRank, PositionedSampler
from trainer_sdk.numerics.skips import Positions
from trainer_sdk.sdk_log import warn_once

Batch = TypeVar("Batch")
_MOST_STEPS = 4096
"""How many steps back a position is remembered."""


class _Given(msgspec.Struct, Generic[Batch], frozen=True):
    batch: Batch
    begin: int
    end: int


class Batches(Generic[Batch]):
    """The batches of this rank; all ranks make the same calls.

    Without `skips` nobody wants to pass over any, so they need no position.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        state: Mapping[str, Any],
        spans: Iterable[Positions] = (),
        *,
        skips: bool = True,
    ) -> None:
        self._batches = batches
        self._spans = tuple(spans)
        self._sampler = _sampler_of(batches, state)
        self._loader = next((part for part in _loaders_in(state) if part.is_of(batches)), None)
        self._skippable = self._sampler is not None or self._loader is not None
        self._kept: list[_Given[Batch]] = []
        """The batches since the last decided step."""
        self._again: deque[_Given[Batch]] = deque()
        self._begins: deque[tuple[int, int]] = deque(maxlen=_MOST_STEPS)
        """The first positions of decided steps, by step."""
        self._end = 0
        self._source: Iterator[Batch] | None = None
        self._passes = 0
        """Of a loader: how many passes the script has begun, with those before a restart."""
        self._epoch: int | None = None
        """The epoch that the script has set for its present pass."""
        self.at_end: Callable[[], bool] = lambda: False
        """Called when the batches of a pass are used up; whether there are more, after all."""
        if self._sampler is not None:
            self._sampler.skip(self._spans)
        elif self._loader is None and skips:
            warn_once(
                "numerics: the batches have no position, so none can be passed over: give a "
                "loader whose batch_sampler is a PositionedSampler, or a StatefulDataLoader, with "
                "PositionedSampler or PerRank in the state"
            )

    @property
    def can_skip(self) -> bool:
        """Whether positions are known."""
        return self._skippable

    @property
    def position(self) -> Positions | None:
        """The data of the step that is being made; None if positions are not known."""
        if not self.can_skip:
            return None
        return (self._kept[0].begin if self._kept else self._end), self._end

    def span(self, since: int, step: int) -> Positions | None:
        """The data from a step on to the present one; None if positions are not known.

        Steps that an earlier process has made count as having used as much data as the present one.
        """
        present = self.position
        if present is None:
            return None
        steps = [*self._begins, (step, present[0])]
        first, begin = next(each for each in steps if each[0] >= min(since, step))
        before = max(first - since, 0) * (present[1] - present[0])
        return max(begin - before, 0), present[1]

    def taken(self, step: int) -> None:
        """The present step is decided: its batches are not given again."""
        if self._kept:
            self._begins.append((step, self._kept[0].begin))
            self._kept.clear()

    def again(self) -> None:
        """Give the batches of the present step once more, as if they had not been given."""
        self._again = deque(self._kept)
        if self._kept:
            self._go_to(self._kept[0].begin)

    def rewind(self, step: int, spans: Iterable[Positions]) -> None:
        """The position was restored, as of after this step: go on from there, without `spans`.

        The next batch comes from an iterator that is made anew.
        """
        self._spans = tuple(spans)
        if self._sampler is not None:
            self._sampler.skip(self._spans)
        elif self._loader is None:
            return
        self._source = None
        self._kept.clear()
        self._again.clear()
        while self._begins and self._begins[-1][0] > step:
            self._begins.pop()

    def __iter__(self) -> Generator[Batch]:
        """The batches of one pass; after a roll-back also the rest of earlier passes."""
        self._source = None
        if self._loader is not None:
            self._begin_pass(self._loader)
        while True:
            if self._again:
                given = self._again.popleft()
                self._go_to(given.end)
            else:
                if self._source is None:
                    self._source = self._begun()
                begin = self._begin if self._skippable else 0
                try:
                    batch = next(self._source)
                except StopIteration:
                    if self.at_end():
                        continue
                    return
                given = _Given(batch, begin, self._at if self._skippable else 0)
                self._kept.append(given)
            self._end = given.end
            yield given.batch

    def _begun(self) -> Iterator[Batch]:
        if self._sampler is not None:
            return self._sampler.counted(self._batches)
        if self._loader is not None:
            return self._of_loader(self._loader)
        return iter(self._batches)

    def _begin_pass(self, loader: PerRank) -> None:
        if self._passes or not loader.given:  # otherwise a restored pass goes on
            loader.passes += 1
        self._passes = loader.passes
        loader.epoch = self._epoch = getattr(getattr(self._batches, "sampler", None), "epoch", None)

    def _of_loader(self, loader: PerRank) -> Generator[Batch]:
        """The rest of the restored pass, and all passes up to the one that the script is in."""
        if loader.passes < self._passes:
            self._to_epoch(loader.epoch)
        yield from self._of_pass(loader)
        while loader.passes < self._passes:
            loader.passes += 1
            behind = self._passes - loader.passes
            loader.epoch = None if self._epoch is None else self._epoch - behind
            self._to_epoch(loader.epoch)
            yield from self._of_pass(loader)

    def _of_pass(self, loader: PerRank) -> Generator[Batch]:
        batches = iter(self._batches)
        while True:
            try:
                while self._is_skipped(loader.given):
                    loader.drop(batches)
                batch = next(batches)
            except StopIteration:
                return
            loader.given += 1
            yield batch

    def _to_epoch(self, epoch: int | None) -> None:
        set_epoch = getattr(getattr(self._batches, "sampler", None), "set_epoch", None)
        if epoch is not None and set_epoch is not None:
            set_epoch(epoch)

    def _is_skipped(self, number: int) -> bool:
        return any(begin <= number < end for begin, end in self._spans)

    @property
    def _at(self) -> int:
        if self._sampler is not None:
            return self._sampler.consumed
        return 0 if self._loader is None else self._loader.given

    @property
    def _begin(self) -> int:
        """The position of the next batch."""
        if self._sampler is not None:
            return self._sampler.begins_at
        number = self._at
        while self._is_skipped(number):
            number += 1
        return number

    def _go_to(self, position: int) -> None:
        if self._sampler is not None:
            self._sampler.go_to(position)
        elif self._loader is not None:
            self._loader.given = position


def _sampler_of(batches: object, state: Mapping[str, Any]) -> PositionedSampler | None:
    """The sampler of a loader, if the state has it: otherwise a restore would not move it."""
    sampler = getattr(batches, "batch_sampler", None)
    is_saved = any(part is sampler for part in state.values())
    return sampler if is_saved and isinstance(sampler, PositionedSampler) else None


def _loaders_in(state: Mapping[str, Any]) -> Iterator[PerRank]:
    return (part for part in state.values() if isinstance(part, PerRank))
