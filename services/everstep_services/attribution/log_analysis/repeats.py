"""Blocks of lines that a log repeats, such as one traceback in each turn of a loop.

A block whose lines have the keys of an earlier one (`line_keys.py`) means the same: it is counted,
and not read again. Repeated blocks that follow each other become one longer block, a run.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from everstep_services.attribution.log_analysis.attempts import OriginKey, whose
from everstep_services.attribution.log_analysis.origins import Origin
from everstep_services.attribution.log_analysis.pending_work import PendingWork
from everstep_services.attribution.log_analysis.report import Failure

Key: TypeAlias = int | bytes
"""What a line has in common with all that mean the same."""
_MOST_BLOCKS = 8192
_MOST_ALIKE = 32
_MOST_RUNS_ALIKE = 4
_LONGEST = 200
_LONGEST_RUN = 1024
_LONGEST_TURN = 256
_LEAST_TURN = 24
"""The lines of a turn of a loop."""
_LEAST_OF_RUN = 4
"""The lines of a run by which it is looked up."""
_LEAST = 3
"""The least lines of a traceback: by these it is looked up."""


class BlockEffect(msgspec.Struct, frozen=True):
    """A failure that a block reports."""

    key: OriginKey
    failure: Failure
    after: int
    """The index of its line in the block."""
    begin: int = 0
    """The index of the first line that tells it."""
    peer: int | None = None
    """The rank that it accuses."""
    raised: Origin | None = None
    """Who raised it, if it is an exception."""
    is_uncaught: bool = False
    work: tuple[tuple[str, int], PendingWork] | None = None
    """The collective of a group that a rank was in when it timed out."""
    unsaid: Origin | None = None
    """Whose next line tells its text, if it has none yet."""
    origins: Mapping[Origin, int | None] = {}
    """As those of its block."""


@dataclass(slots=True, eq=False)
class RepeatedBlock:
    """Lines by their keys, and what they report."""

    lines: Sequence[Key]
    effects: Sequence[BlockEffect]
    origins: Mapping[Origin, int | None] = field(default_factory=dict)
    """Origins of lines whose meaning depends on earlier ones: the rank that a summary named."""
    year: int | None = None
    """The last year that they have."""
    processes: Sequence[tuple[int, int]] = ()
    """The indices of lines with the process of a rank, and the rank."""
    ended: Collection[Origin] = ()
    """Origins whose summaries have ended."""
    summaries: Mapping[Origin, int] | None = None
    """The rank that the last summary has named, if one began."""
    is_unsaid: bool = field(init=False)
    """Whether the line after it may tell the text of a failure."""
    is_failure: bool = field(init=False)
    """Whether it reports more than hints."""
    is_end: bool = field(init=False)
    """Whether it reports more than hints and consequences."""
    raised: dict[tuple[Origin, str], tuple[int, int]] = field(init=False)
    """The exceptions by origin and name, with the first and the last line from the begin."""
    uncaught: set[tuple[Origin, str]] = field(init=False)
    last_raised: dict[Origin, BlockEffect] = field(init=False)

    def __post_init__(self) -> None:
        roles = {effect.failure.role for effect in self.effects} - {"hint"}
        self.is_failure, self.is_end = bool(roles), bool(roles - {"cascade"})
        self.is_unsaid = any(effect.unsaid is not None for effect in self.effects)
        self.raised, self.uncaught, self.last_raised = {}, set(), {}
        for effect in self.effects:
            if effect.raised is not None:
                name = effect.failure.fingerprint
                first, _ = self.raised.get((effect.raised, name), (effect.after, 0))
                self.raised[effect.raised, name] = (first, effect.after)
                self.last_raised[effect.raised] = effect
                if effect.is_uncaught:
                    self.uncaught.add((whose(effect.raised), name))


class OpenBlock:
    """What the lines since the begin of a block report."""

    def __init__(self) -> None:
        self.effects: list[BlockEffect] = []
        self.is_plain = True
        """Whether the lines have no meaning beyond the failures that they report."""
        self.origins: dict[Origin, int | None] = {}
        self.year: int | None = None
        self.processes: list[tuple[int, int]] = []
        self.ended: set[Origin] = set()
        self.summaries: dict[Origin, int] | None = None

    def closed(self, lines: Sequence[Key], begin: int) -> RepeatedBlock | None:
        """The block that begins at an index of a chunk; None if it may mean more again."""
        if not self.is_plain:
            return None
        effects = [
            replace(effect, after=effect.after - begin, origins=self.origins)
            for effect in self.effects
        ]
        processes = [(at - begin, rank) for at, rank in self.processes]
        return RepeatedBlock(
            lines, effects, self.origins, self.year, processes, self.ended, self.summaries
        )


class _Run:
    """Blocks that have followed each other."""

    def __init__(self, lines: Sequence[Key], blocks: Sequence[tuple[int, RepeatedBlock]]) -> None:
        self.lines, self._blocks = lines, blocks
        size = len(lines)
        self._places = slice(size // 2, size, max(1, size // 2 - 1))
        self._some = lines[self._places]
        """Some of the lines, that most other runs lack at these places."""
        self._whole: RepeatedBlock | None = None

    def begins(self, lines: Sequence[Key], at: int) -> bool:
        """Whether these lines stand at an index."""
        places, size = self._places, len(self.lines)
        some = lines[at + places.start : at + size : places.step]
        return some == self._some and lines[at : at + size] == self.lines

    @property
    def whole(self) -> RepeatedBlock:
        """The blocks as one."""
        if self._whole is None:
            self._whole = _joined(self.lines, self._blocks)
        return self._whole


class _Runs:
    """The runs of a file, up to a length; turns end where their first block comes again."""

    def __init__(self, longest: int, most_alike: int, *, are_turns: bool = False) -> None:
        self._longest, self._most_alike, self._are_turns = longest, most_alike, are_turns
        self._runs: dict[tuple[Key, ...], list[_Run]] = {}
        """By their first lines, the latest first: the longest of those that begin alike."""
        self._run: list[tuple[int, RepeatedBlock]] = []
        """The blocks that have followed each other up to now, and where each begins."""
        self._lines: Sequence[Key] = ()

    def find(self, lines: Sequence[Key], at: int) -> RepeatedBlock | None:
        """The run that begins at a line, if it is known."""
        for run in self._runs.get(tuple(lines[at : at + _LEAST_OF_RUN]), ()):
            if run.begins(lines, at):
                return run.whole
        return None

    def follow(
        self, block: RepeatedBlock, lines: Sequence[Key], at: int, progress: Sequence[int]
    ) -> None:
        """Note that this block was found next; `progress` are the lines about progress."""
        if self._run:
            (last, before), (begin, first) = self._run[-1], self._run[0]
            is_long = at + len(block.lines) - begin > self._longest
            is_turn = self._are_turns and (
                len(block.lines) >= _LEAST_TURN
                or len(first.lines) >= _LEAST_TURN
                or (block is first and at - begin >= _LEAST_TURN)
            )
            if (
                is_long
                or is_turn
                or lines is not self._lines
                or (bisect_left(progress, last + len(before.lines)) < bisect_left(progress, at))
            ):
                self.end()
        self._run.append((at, block))
        self._lines = lines

    def end(self) -> None:
        """Remember the run up to now: what follows does not belong to it."""
        run, self._run = self._run, []
        while run and run[-1][1].is_unsaid:
            del run[-1]
        # Only then would each block alone find the same steps before the first failure.
        if len(run) < 2 or not run[0][1].is_failure:
            return
        begin, (last, block) = run[0][0], run[-1]
        lines = self._lines[begin : last + len(block.lines)]
        if len(lines) < _LEAST_OF_RUN:
            return
        if len(self._runs) >= _MOST_BLOCKS // 8:
            self._runs.clear()
        alike = self._runs.setdefault(tuple(lines[:_LEAST_OF_RUN]), [])
        alike.insert(0, _Run(lines, [(at - begin, block) for at, block in run]))
        del alike[self._most_alike :]


class RepeatedBlocks:
    """The blocks of one file."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[Key, ...], list[RepeatedBlock]] = {}
        self._size = 0
        self._runs = (
            _Runs(_LONGEST_RUN, _MOST_RUNS_ALIKE),
            _Runs(_LONGEST_TURN, _MOST_ALIKE, are_turns=True),
        )

    def find_run(self, lines: Sequence[Key], at: int) -> RepeatedBlock | None:
        """The run that begins at a line, if it is known."""
        return self._runs[0].find(lines, at) or self._runs[1].find(lines, at)

    def follow(
        self, block: RepeatedBlock, lines: Sequence[Key], at: int, progress: Sequence[int]
    ) -> None:
        """Note that this block was found next; `progress` are the lines about progress."""
        for runs in self._runs:
            runs.follow(block, lines, at, progress)

    def end_run(self) -> None:
        """Remember the runs up to now: what follows does not belong to them."""
        for runs in self._runs:
            runs.end()

    def find(
        self, lines: Sequence[Key], at: int, fits: Callable[[RepeatedBlock], bool]
    ) -> RepeatedBlock | None:
        """The block that begins at a line, if it is known and fits what stands before it."""
        for start in ((lines[at],), tuple(lines[at : at + _LEAST])):
            for block in self._blocks.get(start, ()):
                if lines[at : at + len(block.lines)] == block.lines and fits(block):
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
        alike = self._blocks.setdefault(tuple(block.lines[:length]), [])
        if len(alike) >= _MOST_ALIKE:
            del alike[0]
            self._size -= 1
        alike.append(block)
        self._size += 1


def _joined(lines: Sequence[Key], blocks: Sequence[tuple[int, RepeatedBlock]]) -> RepeatedBlock:
    """The blocks at these places as one."""
    effects: list[BlockEffect] = []
    origins: dict[Origin, int | None] = {}
    year: int | None = None
    processes: list[tuple[int, int]] = []
    ended: set[Origin] = set()
    summaries: dict[Origin, int] | None = None
    for at, block in blocks:
        effects += [
            replace(effect, after=effect.after + at, begin=effect.begin + at)
            for effect in block.effects
        ]
        processes += [(line + at, rank) for line, rank in block.processes]
        if summaries is None:  # a summary settles what was before
            origins |= {
                it: block.origins[it] for it in block.origins.keys() - ended - origins.keys()
            }
        ended.update(block.ended)
        if block.summaries is not None:
            summaries = dict(block.summaries)
        elif summaries is not None:
            summaries = {it: rank for it, rank in summaries.items() if it not in block.ended}
        year = block.year or year
    return RepeatedBlock(lines, effects, origins, year, processes, ended, summaries)
