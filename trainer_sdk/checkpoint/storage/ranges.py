"""Many small pieces of files, read with few requests: each is a way to a server and back."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer_sdk.checkpoint.storage.port import Storage

_MOST_BYTES = 16 << 20
"""Of several that are read at once."""
_MOST_BETWEEN_BYTES = 256 << 10
"""What nobody wants is read, too, where that is sooner done than asking once more."""


class Range(NamedTuple):
    """A piece of a file."""

    file: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset of what comes after it."""
        return self.offset + self.length


def read_ranges(storage: Storage, ranges: Sequence[Range]) -> Iterator[tuple[int, memoryview]]:
    """What is in each, with its number among these, in the order in which they lie in their files.

    The number of requests grows with the bytes, and not with the number of pieces.
    """
    for numbers in _near(ranges):
        file, begin, _ = ranges[numbers[0]]
        end = max(ranges[number].end for number in numbers)
        octets = memoryview(storage.read(file, begin, end - begin))
        for number in numbers:
            one = ranges[number]
            yield number, octets[one.offset - begin : one.end - begin]


def _near(ranges: Sequence[Range]) -> Iterator[list[int]]:
    """The numbers of those that are read at once."""
    near: list[int] = []
    begin = end = 0
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        one = ranges[number]
        is_near = (
            bool(near)
            and one.file == ranges[near[0]].file
            and one.offset - end <= _MOST_BETWEEN_BYTES
            and one.end - begin <= _MOST_BYTES
        )
        if near and not is_near:
            yield near
            near = []
        if not near:
            begin = end = one.offset
        near.append(number)
        end = max(end, one.end)
    if near:
        yield near
