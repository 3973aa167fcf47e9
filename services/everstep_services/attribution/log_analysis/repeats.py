"""Blocks of lines that a log repeats, such as one traceback in each turn of a loop.

A block that is equal to an earlier one, but for minutes and seconds, means the same: it is counted,
and not read again.
"""

import re
from collections.abc import Sequence

import msgspec

from everstep_services.attribution.log_analysis.attempts import OriginKey
from everstep_services.attribution.log_analysis.origins import Origin
from everstep_services.attribution.log_analysis.report import Failure

_TIMES = re.compile(rb":\d\d:\d\d(?:[.,]\d{1,9})?")
"""Minutes and seconds: a pattern that begins with a letter is found fastest."""
_MOST_BLOCKS = 8192
_MOST_ALIKE = 32
_LONGEST = 200
_LEAST = 3
"""The least lines of a traceback: by these it is looked up."""


class BlockEffect(msgspec.Struct, frozen=True):
    """A failure that a block reports."""

    key: OriginKey
    failure: Failure
    after: int
    """The lines from the begin of the block."""
    peer: int | None = None
    """The rank that it accuses."""
    raised: Origin | None = None
    """Who raised it, if it is an exception."""
    is_uncaught: bool = False


class RepeatedBlock(msgspec.Struct, frozen=True):
    """Lines without times, and what they report."""

    lines: Sequence[bytes]
    effects: Sequence[BlockEffect]


class RepeatedBlocks:
    """The blocks of one file."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, list[RepeatedBlock]] = {}
        self._size = 0

    def find(self, lines: Sequence[bytes], at: int) -> RepeatedBlock | None:
        """The block that begins at a line, if it is known."""
        for start in (lines[at], b"\n".join(lines[at : at + _LEAST])):
            for block in self._blocks.get(start, ()):
                if lines[at : at + len(block.lines)] == block.lines:
                    return block
        return None

    def add(self, block: RepeatedBlock) -> None:
        """Remember a block that was read."""
        if len(block.lines) > _LONGEST:
            return
        if self._size >= _MOST_BLOCKS:
            self._blocks.clear()
            self._size = 0
        length = 1 if len(block.lines) < _LEAST else _LEAST
        alike = self._blocks.setdefault(b"\n".join(block.lines[:length]), [])
        if len(alike) >= _MOST_ALIKE:
            del alike[0]
            self._size -= 1
        alike.append(block)
        self._size += 1


def without_times(contents: Sequence[bytes]) -> list[bytes]:
    """The lines of a chunk without times of day."""
    return _TIMES.sub(b"", b"\n".join(contents)).split(b"\n")
