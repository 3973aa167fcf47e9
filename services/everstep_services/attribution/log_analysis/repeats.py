"""Blocks of lines that a log repeats, such as one traceback in each turn of a loop.

A block that is equal to an earlier one, but for minutes and seconds, means the same: it is counted,
and not read again. Repeated blocks that follow each other become one longer block, a run.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from everstep_services.attribution.log_analysis.attempts import OriginKey, whose
from everstep_services.attribution.log_analysis.origins import Origin
from everstep_services.attribution.log_analysis.pending_work import PendingWork
from everstep_services.attribution.log_analysis.report import Failure

_TIMES = re.compile(rb":\d\d:\d\d(?:[.,]\d{1,9})?")
"""Minutes and seconds: a pattern that begins with a letter is found fastest."""
_MOST_BLOCKS = 8192
_MOST_ALIKE = 32
_LONGEST = 200
_LONGEST_RUN = 1024
_LEAST_OF_RUN = 4
"""The lines of a run by which it is looked up."""
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
    work: tuple[tuple[str, int], PendingWork] | None = None
    """The collective of a group that a rank was in when it timed out."""


@dataclass(slots=True, eq=False)
class RepeatedBlock:
    """Lines without times, and what they report."""

    lines: Sequence[bytes]
    effects: Sequence[BlockEffect]
    is_failure: bool = field(init=False)
    """Whether it reports more than hints."""
    is_end: bool = field(init=False)
    """Whether it reports more than hints and consequences."""
    raised: dict[tuple[Origin, str], tuple[int, int]] = field(init=False)
    """The exceptions by origin and name, with the first and the last line from the begin."""
    uncaught: set[tuple[Origin, str]] = field(init=False)
    last_raised: dict[Origin, BlockEffect] = field(init=False)
    ends: Sequence[bytes] = field(init=False)
    """Some of the lines, that most other runs lack at these places."""

    def __post_init__(self) -> None:
        roles = {effect.failure.role for effect in self.effects} - {"hint"}
        self.is_failure, self.is_end = bool(roles), bool(roles - {"cascade"})
        self.raised, self.uncaught, self.last_raised = {}, set(), {}
        size = len(self.lines)
        self.ends = self.lines[size // 2 :: max(1, size // 2 - 1)]
        for effect in self.effects:
            if effect.raised is not None:
                name = effect.failure.fingerprint
                first, _ = self.raised.get((effect.raised, name), (effect.after, 0))
                self.raised[effect.raised, name] = (first, effect.after)
                self.last_raised[effect.raised] = effect
                if effect.is_uncaught:
                    self.uncaught.add((whose(effect.raised), name))


class RepeatedBlocks:
    """The blocks of one file."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, list[RepeatedBlock]] = {}
        self._size = 0
        self._runs: dict[bytes, list[RepeatedBlock]] = {}
        """By their first lines, the latest first: the longest of those that begin alike."""
        self._run: list[tuple[int, RepeatedBlock]] = []
        """The blocks that have followed each other up to now, and where each begins."""
        self._run_lines: Sequence[bytes] = ()

    def find_run(self, lines: Sequence[bytes], at: int) -> RepeatedBlock | None:
        """The run that begins at a line, if it is known."""
        if not self._runs:
            return None
        for run in self._runs.get(b"\n".join(lines[at : at + _LEAST_OF_RUN]), ()):
            size = len(run.lines)
            ends = lines[at + size // 2 : at + size : max(1, size // 2 - 1)]  # few, at first
            if ends == run.ends and lines[at : at + size] == run.lines:
                return run
        return None

    def find(self, lines: Sequence[bytes], at: int) -> RepeatedBlock | None:
        """The block that begins at a line, if it is known."""
        for start in (lines[at], b"\n".join(lines[at : at + _LEAST])):
            for block in self._blocks.get(start, ()):
                if lines[at : at + len(block.lines)] == block.lines:
                    return block
        return None

    def follow(
        self, block: RepeatedBlock, lines: Sequence[bytes], at: int, progress: Sequence[int]
    ) -> None:
        """Note that this block was found next; `progress` are the lines about progress."""
        if self._run:
            last, before = self._run[-1]
            is_long = at + len(block.lines) - self._run[0][0] > _LONGEST_RUN
            if (
                is_long
                or lines is not self._run_lines
                or (bisect_left(progress, last + len(before.lines)) < bisect_left(progress, at))
            ):
                self.end_run()
        self._run.append((at, block))
        self._run_lines = lines

    def end_run(self) -> None:
        """Remember the run up to now: what follows does not belong to it."""
        run, self._run = self._run, []
        # Only then would each block alone find the same steps before the first failure.
        if len(run) < 2 or not run[0][1].is_failure:
            return
        begin, (last, block) = run[0][0], run[-1]
        lines = self._run_lines[begin : last + len(block.lines)]
        if len(lines) < _LEAST_OF_RUN:
            return
        if len(self._runs) >= _MOST_BLOCKS // 8:
            self._runs.clear()
        effects = [
            replace(effect, after=effect.after + at - begin)
            for at, block in run
            for effect in block.effects
        ]
        alike = self._runs.setdefault(b"\n".join(lines[:_LEAST_OF_RUN]), [])
        alike.insert(0, RepeatedBlock(lines, effects))
        del alike[_MOST_ALIKE:]

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
