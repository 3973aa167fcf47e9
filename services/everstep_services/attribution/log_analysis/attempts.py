"""Where one attempt of a training ends in a log, and the next begins.

A log holds several attempts where a launcher restarts its ranks, a requeued job appends to its
file, or a loop starts the script again. An attempt has ended once a line reports a failure. The
next has begun when a launcher or the script reports a start, when steps are counted again from an
earlier one, or when an exception that ends a process comes again after further steps.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias

from everstep_services.attribution.log_analysis import clocks
from everstep_services.attribution.log_analysis.chunks import text_of
from everstep_services.attribution.log_analysis.origins import ANY_FILE, Origin, of_line
from everstep_services.attribution.log_analysis.pending_work import PendingWork, work_of

Role = Literal["root", "weak", "cascade", "hint"]
"""A hint is a cause only where nothing else is known, and never a sure one."""
START_WORDS = (
    "will restart worker group", "starting worker group", "setting omp_num_threads environment",
    "starting elastic_operator", "world info dict", "initializing distributed: global_rank",
    "starting with jobenvironment", "loading checkpoint", "loaded checkpoint", "restoring states",
    "resuming from", "resuming training", "resume from", "continuing training from",
)  # fmt: skip
"""In each line that a launcher, or a script, writes when a training starts (again)."""
MOST_ATTEMPTS = 8
"""As many of the last attempts of a file are kept."""
MOST_ORIGINS = 20_000
_MOST_FAILURES = 8
_MOST_SEEN = 512
_STEPS_ON = 3
_MOST_WATCHED = 4096
_NUMBERED = re.compile(r"(?:^|/)(?:round|attempt|cycle|restart)[-_](\d{1,6})(?=/|\.|$)")
_EPOCH = re.compile(r"(?i)\bepoch\W{0,12}(\d{1,9})\b")
_PART = re.compile(r"\b(\d{1,12})/\s{0,12}\d")

OriginKey: TypeAlias = tuple[int | None, str]
"""A rank, or a member or node where no rank is known."""
_OF_OTHERS: OriginKey = (None, "")
"""All origins beyond the limit."""
Position: TypeAlias = tuple[int, int]
"""An epoch and a step, −1 where a line counts none."""


@dataclass(slots=True, eq=False, kw_only=True)
class FailureKind:
    """What all lines have in common that report a failure again."""

    key: OriginKey
    origin: Origin
    rule: str
    failure_class: str
    severity: int
    role: Role
    name: str
    """Its fingerprint."""
    peer: int | None = None
    """The rank that it accuses."""
    is_raised: bool = False
    """Whether it is the exception of a traceback."""
    is_uncaught: bool = False
    work: tuple[str, int] | None = None
    """The group and the rank that timed out in a collective."""
    is_failure: bool = field(init=False)
    """Whether it is more than a hint."""
    is_end: bool = field(init=False)
    """Whether it is more than a hint and than a consequence."""

    process: tuple[Origin, str] = field(init=False)
    """The rank or task whose exception it is, and its name."""
    raised_by: tuple[Origin, str] = field(init=False)
    attempt: "Attempt | None" = None
    """The attempt in which it was seen, where what is kept lacks it yet."""
    seen_steps: int = -1
    """How many steps had been seen when it last ended a process."""
    kept: "OriginFailures" = field(init=False)
    times: int = 0
    last: "Place" = (0, b"", 0, ())

    def __post_init__(self) -> None:
        self.is_failure = self.role != "hint"
        self.is_end = self.is_failure and self.role != "cascade"
        self.process = (whose(self.origin), self.name)
        self.raised_by = (self.origin, self.name)


Place: TypeAlias = tuple[int, bytes, int | bytes, Sequence[bytes]]
"""The number and the content of a line, the year that was known there, and lines of frames."""
Sighting: TypeAlias = tuple[FailureKind, Place]


class OriginFailures:
    """The failures of one origin in one attempt: of each name the first and the last."""

    def __init__(self) -> None:
        self._first: dict[str, Sighting] = {}
        self._last: dict[str, Sighting] = {}
        self._less = 0
        """Those that make room for a root."""
        self._lacks_some = False
        self.may_lack = False
        """Whether a failure that came before may be kept now: there was no room for it."""
        self.cascades: Counter[str] = Counter()

    def add(self, kind: FailureKind, place: Place) -> None:
        """Take a failure."""
        name = kind.name
        if name in self._first:
            last = self._last.get(name)
            if last is None or last[1][0] < place[0]:
                self._last[name] = kind, place
            return
        if len(self._first) < _MOST_FAILURES or (kind.role == "root" and self._make_room()):
            self._first[name] = kind, place
            self._less += kind.role != "root"
        else:
            self._lacks_some = True
        self._see_room()

    @property
    def rules(self) -> list[str]:
        """The rules of the failures that are kept."""
        return [kind.rule for kind, _ in self._first.values()]

    def first(self) -> dict[str, Sighting]:
        """The first failure of each name."""
        return dict(self._first)

    def last(self, name: str) -> Sighting | None:
        """The last failure of this name, if it came again."""
        return self._last.get(name)

    def see_again(self, kind: FailureKind, place: Place) -> None:
        """Take a failure that came before, if it is not kept."""
        if kind.name not in self._first:
            self.add(kind, place)

    def forget(self, kind: FailureKind) -> None:
        """Drop a failure that was handled, if it came once: its rank raised another one instead."""
        if kind.name not in self._first or kind.name in self._last:
            return
        first, _ = self._first[kind.name]
        if first.kept is self:
            if first.times > 1:
                return
            first.attempt = None
        del self._first[kind.name]
        self._less -= first.role != "root"
        self._see_room()

    def _make_room(self) -> bool:
        if not self._less:
            return False
        name = next(name for name, (kept, _) in self._first.items() if kept.role != "root")
        del self._first[name]
        self._last.pop(name, None)
        self._less -= 1
        self._lacks_some = True
        return True

    def _see_room(self) -> None:
        has_room = len(self._first) < _MOST_FAILURES or self._less > 0
        self.may_lack = self._lacks_some and has_room


class Caught:
    """The tracebacks after which their own rank made a step: somebody caught the exception."""

    def __init__(self) -> None:
        self.places: set[tuple[int, int]] = set()
        """Their files and lines."""
        self._lines: dict[tuple[Origin, str], tuple[int, int]] = {}
        """The lines of the first and the last traceback of each name, in the file being read."""

    def add(self, kind: FailureKind) -> None:
        """Take a traceback."""
        line = kind.last[0]
        first, _ = self._lines.get(kind.raised_by, (line, line))
        if len(self._lines) < _MOST_WATCHED:
            self._lines[kind.raised_by] = (first, line)

    def end_file(self, file: int, steps: Mapping[Origin, Sequence[tuple[int, int]]]) -> None:
        """Compare the tracebacks of a file with the lines and numbers of its steps."""
        for (origin, _), (first, last) in self._lines.items():
            if _has_new_step(steps.get(whose(origin), ()), last):
                self.places.add((file, first))
        self._lines.clear()


class KeptOrigins:
    """How many origins the attempts of all files keep failures of."""

    def __init__(self) -> None:
        self.count = 0

    def key(self, key: OriginKey) -> OriginKey:
        """The key of another origin: beyond the limit that of all others."""
        self.count += 1
        return key if self.count <= MOST_ORIGINS else _OF_OTHERS


@dataclass(slots=True)
class Attempt:
    """What the lines of one attempt in one file report."""

    origins: KeptOrigins = field(default_factory=KeptOrigins)
    caught: Caught = field(default_factory=Caught)
    kept: dict[OriginKey, OriginFailures] = field(default_factory=dict)
    accused: Counter[int] = field(default_factory=Counter)
    enqueued: dict[int, int] = field(default_factory=dict)
    """The last collective that each rank has entered."""
    works: dict[tuple[str, int], PendingWork] = field(default_factory=dict)
    """The collective of each group that a rank was in when it timed out first."""
    _seen: list[FailureKind] = field(default_factory=list)
    """Of these, only the first time is in the others, and in what is kept."""

    def see_first(self, kind: FailureKind, place: Place) -> None:
        """Take a failure that was not seen before, or is not remembered."""
        if len(self._seen) >= _MOST_SEEN:
            self.settle()
        self._seen.append(kind)
        kind.attempt, kind.times, kind.last = self, 1, place
        if kind.work and kind.work not in self.works and len(self.works) < MOST_ORIGINS:
            self.works[kind.work] = _work_in(place[1])
        kept = self.kept.get(kind.key)
        if kept is None:
            kept = self.kept.setdefault(self.origins.key(kind.key), OriginFailures())
        kind.kept = kept
        self._count(kind, 1)

    def settle(self) -> None:
        """Count what was seen again."""
        for kind in self._seen:
            if kind.attempt is self and kind.times > 1:
                self._count(kind, kind.times - 1)
            kind.attempt = None
        self._seen.clear()

    def _count(self, kind: FailureKind, times: int) -> None:
        kind.kept.add(kind, kind.last)
        if kind.role == "cascade":
            kind.kept.cascades[kind.failure_class] += times
        if kind.peer is not None:
            self.accused[kind.peer] += times
        if kind.is_raised:
            self.caught.add(kind)


class FileAttempts:
    """The attempts in one file, and what shows that another one has begun."""

    def __init__(
        self,
        path: Path | None = None,
        origins: KeptOrigins | None = None,
        caught: Caught | None = None,
        steps: Callable[[int], Mapping[Origin, Position]] = lambda _: {},
    ) -> None:
        number = _NUMBERED.findall(path.as_posix()) if path is not None else []
        self.number = int(number[-1]) if number else None
        """The number of the file's attempt, where its name tells it."""
        self._origins, self._caught = origins or KeptOrigins(), caught or Caught()
        self._steps = steps
        """The last steps before a line of the chunk."""
        self.attempts: list[Attempt] = [Attempt(self._origins, self._caught)]
        """The last ones."""
        self.begun = 1
        self._has_failed = False
        self._has_ended = False
        self.wants_steps = False
        """Whether the next lines about progress are needed."""
        self._before: dict[Origin, Position] = {}
        """The last step of each origin before the failure."""
        self._fallen: dict[Origin, Position] = {}
        self._further: Counter[Origin] = Counter()
        self._uncaught: dict[tuple[Origin, str], int] = {}
        """The exceptions that ended a process, and how many steps had been seen by then."""
        self._seen_steps = 0
        self._watched = 0
        self.current = self.attempts[-1]
        """The attempt that the lines belong to."""

    def see(self, kind: FailureKind, place: Place, at: int) -> None:
        """Take a failure; `at` is the index of its line in its chunk."""
        if kind.attempt is self.current:
            kind.times += 1
            kind.last = place
            if kind.kept.may_lack:
                kind.kept.see_again(kind, place)
        else:
            self.current.see_first(kind, place)
        if kind.is_failure:
            self._has_ended |= kind.is_end
            if not self._has_failed:
                self._has_failed = self.wants_steps = True
                self._before, self._fallen, self._further = {**self._steps(at)}, {}, Counter()
                self._watched = 0

    def see_uncaught(self, kind: FailureKind) -> None:
        """Take an exception that ended a process: if it comes again, another process raised it."""
        if kind.attempt is self.current and kind.seen_steps == self._seen_steps:
            return
        before = self._uncaught.get(kind.process)
        if before is not None and before < self._seen_steps:
            self._begin()
        if len(self._uncaught) > _MOST_WATCHED:
            self._uncaught.clear()
            self.current.settle()
        self._uncaught[kind.process] = kind.seen_steps = self._seen_steps

    def see_start(self) -> None:
        """Take a line that reports a start; after a failure it is that of the next attempt."""
        if self._has_ended:
            self._begin()

    def see_step(self, origin: Origin, position: Position | None) -> None:
        """Take a line about progress after a failure."""
        self._watched += 1
        self.wants_steps = self._watched < _MOST_WATCHED
        if position is None:
            return
        self._seen_steps += 1
        before = self._before.get(origin)
        if before is None:
            self._before[origin] = position
        elif position <= before:
            fallen = self._fallen.setdefault(origin, position)
            is_far = position[0] == before[0] and position[1] < before[1] - 1
            if is_far or fallen < position or (origin.is_of_rank and position < before):
                self._begin()
        else:
            self._further[origin] += 1
            if self._further[origin] >= _STEPS_ON:
                self._has_failed = self._has_ended = self.wants_steps = False

    def _begin(self) -> None:
        self.begun += 1
        self.current.settle()
        self.current = Attempt(self._origins, self._caught)
        if len(self.attempts) == MOST_ATTEMPTS:
            self._origins.count -= len(self.attempts.pop(0).kept)
        self.attempts.append(self.current)
        self._has_failed = self._has_ended = self.wants_steps = False
        self._uncaught.clear()


def _work_in(content: bytes) -> PendingWork:
    work = work_of(of_line(text_of(content), ANY_FILE)[1])
    assert work is not None
    return work[1]


def position_of(text: str) -> Position | None:
    """The epoch and the step that a line about progress counts."""
    epoch, step = _EPOCH.search(text), clocks.step_of(text)
    if step is None and (part := _PART.search(text)):
        step = int(part[1])
    if step is None and epoch is None:
        return None
    return (int(epoch[1]) if epoch else -1, -1 if step is None else step)


@lru_cache(maxsize=4096)
def step_of_line(line: str, file: Origin) -> tuple[Origin, Position | None]:
    """Whose line about progress it is, and what it counts: many failures have the same before."""
    origin, text = of_line(line, file)
    return whose(origin), position_of(text)


@lru_cache(maxsize=256)
def last_steps(lines: Sequence[str], file: Origin) -> Mapping[Origin, Position]:
    """The last position of each origin in lines about progress."""
    steps = (step_of_line(line, file) for line in lines)
    return {origin: position for origin, position in steps if position is not None}


def aligned(files: Sequence[FileAttempts]) -> Mapping[int, list[Attempt]]:
    """The attempts of all files, counted from 1: files without a number end with the last one."""
    first = min((file.number for file in files if file.number is not None), default=0)
    total = max(((file.number or first) - first + file.begun for file in files), default=1)
    numbers: dict[int, list[Attempt]] = {}
    for file in files:
        last = total if file.number is None else file.number - first + file.begun
        for back, attempt in enumerate(reversed(file.attempts)):
            numbers.setdefault(last - back, []).append(attempt)
    return numbers


def whose(origin: Origin) -> Origin:
    """The origin by its rank alone, else by its local rank or task."""
    if origin.rank is not None:
        return Origin(origin.file, origin.rank)
    return Origin(origin.file, None, origin.member)


def _has_new_step(steps: Sequence[tuple[int, int]], line: int) -> bool:
    """Whether a later step is counted after a line: a summary repeats only the last step."""
    before = max((step for number, step in steps if number < line), default=-1)
    return any(number > line and step > before for number, step in steps)
