"""How the ranks share the batch of a step: the same samples and gradient with any number of ranks.

Each rank has a contiguous part of the global batch, of equal size up to one sample, and makes it in
micro-batches. All ranks have the same number of these, as sharded modules gather their parameters
in each. The gradient of the step is the mean over the samples of the global batch: each micro-batch
takes part with the weight that its number of samples deserves.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from trainer_sdk.checkpoint import arguments


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that a rank computes at once."""

    offset: int
    """How many samples of the global batch come before."""
    size: int
    weight: float
    """The factor of the mean of the samples' losses, before the backward pass. With 0 the samples
    are those of another micro-batch, and fill up a rank that has too few."""
    is_last: bool
    """Whether it ends the step of this rank, whose gradients are exchanged then."""


@dataclass(frozen=True, slots=True)
class BatchShare:
    """A rank's part of each global batch."""

    global_batch: int
    micro_batches: tuple[MicroBatch, ...]

    @classmethod
    def of(
        cls,
        global_batch: int,
        *,
        at_most: int | None = None,
        place: tuple[int, int] | None = None,
        is_averaged: bool = True,
    ) -> "BatchShare":
        """The part of the rank at this place, in micro-batches of at most `at_most` samples."""
        whole = arguments.whole("global_batch", global_batch, 1)
        most = whole if at_most is None else arguments.whole("at_most", at_most, 1)
        rank, world_size = own_place() if place is None else place
        world_size = arguments.whole("place", world_size, 1)
        rank = arguments.whole("place", rank, 0, world_size - 1)
        begin, end = (whole * number // world_size for number in (rank, rank + 1))
        count = ceil(ceil(whole / world_size) / most)
        edges = [begin + (end - begin) * number // count for number in range(count + 1)]
        factor = world_size if is_averaged else 1
        micro_batches = [
            MicroBatch(
                offset=min(first, whole - 1),
                size=max(after - first, 1),
                weight=(after - first) * factor / whole,
                is_last=after == edges[-1],
            )
            for first, after in pairwise(edges)
        ]
        return cls(whole, tuple(micro_batches))

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def positions(self, step: int) -> list[range]:
        """The positions of each micro-batch in the order of all samples, after `step` steps."""
        begin = step * self.global_batch
        return [
            range(begin + micro.offset, begin + micro.offset + micro.size)
            for micro in self.micro_batches
        ]


def own_place(otherwise: tuple[int, int] = (0, 1)) -> tuple[int, int]:
    """The number of this rank in the default group, and of all ranks; `otherwise` without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return otherwise
