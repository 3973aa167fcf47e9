"""A state that is larger than the memory for it: copied and written window after window.

The training waits meanwhile for the disk; that is the price of the limit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from trainer_sdk.checkpoint.flat_state import Flat, found_at
from trainer_sdk.checkpoint.save.plan import PAGE_BYTES, Plan


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some bytes of the file, made when a window needs them."""

    begin: int
    length: int
    make: Callable[[], torch.Tensor]


def window_for(plan: Plan, limit_bytes: int) -> int:
    """How much of the file fits into the memory beside what the writer needs besides."""
    return (limit_bytes - plan.beside_bytes) // PAGE_BYTES * PAGE_BYTES


def stretches(plan: Plan, flat: Flat, values: dict[int, bytes]) -> list[Stretch]:
    """The whole file."""
    found = []
    for placed in plan.placed:
        octets = values.get(placed.number)
        found.append(_of_bytes(placed.offset - len(placed.head), placed.head))
        if octets is None:
            bare = partial(_bare, flat, plan.local.indices[placed.number])
            found.append(Stretch(placed.offset, placed.length, bare))
        else:
            found.append(_of_bytes(placed.offset, octets))
        found.append(_of_bytes(placed.offset + placed.length, placed.tail))
    return [one for one in found if one.length]


def fill_window(window: torch.Tensor, at: int, whole: list[Stretch]) -> None:
    """Copy what belongs between `at` and the end of this window."""
    end = at + len(window)
    window.zero_()
    for one in whole:
        first, last = max(one.begin, at), min(one.begin + one.length, end)
        if first < last:
            window[first - at : last - at].copy_(one.make()[first - one.begin : last - one.begin])


def windows(size: int, window: int) -> Iterator[tuple[int, int]]:
    """Where each begins, and how long it is."""
    return ((at, min(window, size - at)) for at in range(0, size, window))


def _of_bytes(begin: int, octets: bytes) -> Stretch:
    return Stretch(
        begin, len(octets), lambda: torch.frombuffer(bytearray(octets), dtype=torch.uint8)
    )


def _bare(flat: Flat, index: MetadataIndex) -> torch.Tensor:
    found: torch.Tensor = found_at(flat, index)
    return found.contiguous().reshape(-1).view(torch.uint8)
