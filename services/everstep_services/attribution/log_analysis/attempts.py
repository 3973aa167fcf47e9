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
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from everstep_services.attribution.log_analysis import clocks
from everstep_services.attribution.log_analysis.chunks import text_of
from everstep_services.attribution.log_analysis.origins import Origin, of_line
from everstep_services.attribution.log_analysis.pending_work import PendingWork, work_of
from everstep_services.attribution.log_analysis.report import Failure

if TYPE_CHECKING:
    from everstep_services.attribution.log_analysis.repeats import BlockEffect, RepeatedBlock

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
_MOST_RUNS = 64
_STEPS_ON = 3
_MOST_WATCHED = 4096
_START = re.compile("|".join(map(re.escape, START_WORDS)), re.IGNORECASE)
_NUMBERED = re.compile(r"(?:^|/)(?:round|attempt|cycle|restart)[-_](\d{1,6})(?=/|\.|$)")
_EPOCH = re.compile(r"(?i)\bepoch\W{0,12}(\d{1,9})\b")
_PART = re.compile(r"\b(\d{1,12})/\s{0,12}\d")

OriginKey: TypeAlias = tuple[int | None, str]
"""A rank, or a member or node where no rank is known."""
_OF_OTHERS: OriginKey = (None, "")
"""All origins beyond the limit."""
Position: TypeAlias = tuple[int, int]
"""An epoch and a step, −1 where a line counts none."""


class RepeatedLines(NamedTuple):
    """Lines that were passed over, because they mean what earlier ones mean."""

    numbers: Sequence[int]
    lines: Sequence[bytes]
    year: int
    """The year that was known there."""
    origins: Mapping[Origin, int | None] = MappingProxyType({})
    """The rank that a summary had named before, of origins for which that matters."""

    def of(self, effect: "BlockEffect") -> "RepeatedLines":
        """The lines that tell of an effect."""
        place = slice(effect.begin, effect.after + 1)
        return RepeatedLines(self.numbers[place], self.lines[place], self.year, effect.origins)


Sighting: TypeAlias = tuple[Failure, RepeatedLines | None]
"""A failure, and other lines that report it, if any."""


class OriginFailures:
    """The failures of one origin in one attempt: of each name the first and the last."""

    def __init__(self) -> None:
        self._first: dict[str, Sighting] = {}
        self._last: dict[str, Sighting] = {}
        self._less = 0
        """Those that make room for a root."""
        self.repeats: Counter[str] = Counter()
        self.cascades: Counter[str] = Counter()

    def add(self, failure: Failure, there: RepeatedLines | None = None, times: int = 1) -> None:
        """Take a failure; `there` report it where the failure is that of earlier lines."""
        name = failure.fingerprint
        if name in self._first:
            if name not in self._last or _line(self._last[name]) < _line((failure, there)):
                self._last[name] = failure, there
        elif len(self._first) < _MOST_FAILURES or (failure.role == "root" and self._make_room()):
            self._first[name] = failure, there
            self._less += failure.role != "root"
        if failure.role == "cascade":
            self.cascades[failure.failure_class] += times
        self.repeats[name] += times
        if len(self.repeats) > 4 * _MOST_FAILURES:
            self.repeats = Counter(dict(self.repeats.most_common(2 * _MOST_FAILURES)))

    @property
    def rules(self) -> list[str]:
        """The rules of the failures that are kept."""
        return [failure.rule for failure, *_ in self._first.values()]

    def first(self) -> dict[str, Sighting]:
        """The first failure of each name."""
        return dict(self._first)

    def last(self, name: str) -> Sighting | None:
        """The last failure of this name, if it came again."""
        return self._last.get(name)

    def forget(self, failure: Failure) -> None:
        """Drop a failure that was handled: its rank raised another one instead."""
        name = failure.fingerprint
        if self.repeats[name] == 1:
            if name in self._first:
                self._less -= self._first.pop(name)[0].role != "root"
            del self.repeats[name]

    def _make_room(self) -> bool:
        if not self._less:
            return False
        name = next(name for name, (kept, *_) in self._first.items() if kept.role != "root")
        del self._first[name]
        self._last.pop(name, None)
        self._less -= 1
        return True


class Caught:
    """The tracebacks after which their own rank made a step: somebody caught the exception."""

    def __init__(self) -> None:
        self.places: set[tuple[int, int]] = set()
        """Their files and lines."""
        self._lines: dict[tuple[Origin, str], tuple[int, int]] = {}
        """The lines of the first and the last traceback of each name, in the file being read."""

    def add(self, origin: Origin, name: str, line: int, last: int = 0) -> None:
        """Take a traceback, or the first and the last of several."""
        first, _ = self._lines.get((origin, name), (line, line))
        if len(self._lines) < _MOST_WATCHED:
            self._lines[origin, name] = (first, last or line)

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
    kept: dict[OriginKey, OriginFailures] = field(default_factory=dict)
    repeats: dict["RepeatedBlock", tuple[int, RepeatedLines, RepeatedLines]] = field(
        default_factory=dict
    )
    """The runs that `kept` lacks: how often they came, the first and the last time."""
    accused: Counter[int] = field(default_factory=Counter)
    enqueued: dict[int, int] = field(default_factory=dict)
    """The last collective that each rank has entered."""
    works: dict[tuple[str, int], PendingWork] = field(default_factory=dict)
    """The collective of each group that a rank was in when it timed out first."""

    def add(
        self, effect: "BlockEffect", there: RepeatedLines | None = None, times: int = 1
    ) -> OriginFailures:
        """Take a failure that its own line reports, or as many equal lines in a repeated block."""
        if effect.peer is not None:
            self.accused[effect.peer] += times
        seen = None if there is None else there.of(effect)
        if effect.work is not None and len(self.works) < MOST_ORIGINS:
            key, work = effect.work
            if key not in self.works:
                self.works[key] = work if seen is None else _work_again(seen, work)
        kept = self.kept.get(effect.key)
        if kept is None:
            kept = self.kept.setdefault(self.origins.key(effect.key), OriginFailures())
        kept.add(effect.failure, seen, times)
        return kept

    def put_off(self, run: "RepeatedBlock", there: RepeatedLines) -> None:
        """Take a run, but do nothing yet about what it reports."""
        before = self.repeats.get(run)
        if before is None and len(self.repeats) >= _MOST_RUNS:
            before = self.settled.repeats.get(run)
        self.repeats[run] = (before[0] + 1, before[1], there) if before else (1, there, there)

    @property
    def settled(self) -> "Attempt":
        """The attempt with all that its repeated runs report."""
        if not self.repeats:
            return self
        runs, self.repeats = self.repeats, {}
        for run, (times, first, last) in runs.items():
            for there, number in ((first, 1), (last, times - 1)):
                for effect in run.effects if number else ():
                    self.add(effect, there, number)
        return self

    def forget(self, key: OriginKey, failure: Failure) -> None:
        """Drop a failure that was handled."""
        kept = self.kept.get(key) or self.kept.get(_OF_OTHERS)
        if kept is not None:
            kept.forget(failure)


class FileAttempts:
    """The attempts in one file, and what shows that another one has begun."""

    def __init__(self, path: Path | None = None, origins: KeptOrigins | None = None) -> None:
        number = _NUMBERED.findall(path.as_posix()) if path is not None else []
        self.number = int(number[-1]) if number else None
        """The number of the file's attempt, where its name tells it."""
        self._origins = origins or KeptOrigins()
        self.attempts: list[Attempt] = [Attempt(self._origins)]
        """The last ones."""
        self.begun = 1
        self._has_failed = False
        self._has_ended = False
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

    @property
    def wants_steps(self) -> bool:
        """Whether the next lines about progress are needed."""
        return self._has_failed and self._watched < _MOST_WATCHED

    def see(
        self,
        failure: Failure,
        steps: Callable[[], Mapping[Origin, Position]],
    ) -> None:
        """Take a failure; `steps` returns the positions before it."""
        if failure.role != "hint":
            self._fail(steps, is_end=failure.role != "cascade")

    def see_run(self, run: "RepeatedBlock", steps: Callable[[], Mapping[Origin, Position]]) -> bool:
        """Take a run of repeated blocks; False if another attempt may begin in it."""
        if len(self._uncaught) + len(run.uncaught) > _MOST_WATCHED:
            return False
        if any(
            self._uncaught.get(who, self._seen_steps) < self._seen_steps for who in run.uncaught
        ):
            return False
        self._uncaught.update(dict.fromkeys(run.uncaught, self._seen_steps))
        self._fail(steps, is_end=run.is_end)
        return True

    def _fail(self, steps: Callable[[], Mapping[Origin, Position]], *, is_end: bool) -> None:
        self._has_ended |= is_end
        if not self._has_failed:
            self._has_failed, self._watched = True, 0
            self._before, self._fallen, self._further = {**steps()}, {}, Counter()

    def see_uncaught(self, origin: Origin, name: str) -> None:
        """Take an exception that ended a process: if it comes again, another process raised it."""
        before = self._uncaught.get((origin, name))
        if before is not None and before < self._seen_steps:
            self._begin()
        self._uncaught[origin, name] = self._seen_steps
        if len(self._uncaught) > _MOST_WATCHED:
            self._uncaught.clear()

    def see_start(self, text: str) -> bool:
        """Whether the line reports a start; after a failure it is that of the next attempt."""
        if not _START.search(text):
            return False
        if self._has_ended:
            self._begin()
        return True

    def see_step(self, origin: Origin, position: Position | None) -> None:
        """Take a line about progress after a failure."""
        self._watched += 1
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
                self._has_failed = self._has_ended = False

    def _begin(self) -> None:
        self.begun += 1
        self.current = Attempt(self._origins)
        if len(self.attempts) == MOST_ATTEMPTS:
            self._origins.count -= len(self.attempts.pop(0).kept)
        self.attempts.append(self.current)
        self._has_failed = self._has_ended = False
        self._uncaught.clear()


def _line(sighting: Sighting) -> int:
    failure, there = sighting
    return failure.line if there is None else there.numbers[-1]


def _work_again(there: RepeatedLines, work: PendingWork) -> PendingWork:
    """The collective that the last line names, which has other numbers."""
    again = work_of(text_of(there.lines[-1]))
    return again[1] if again else work


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
