"""Where one attempt of a training ends in a log, and the next begins.

A log holds several attempts where a launcher restarts its ranks, a requeued job appends to its
file, or a loop starts the script again. An attempt has ended once a line reports a failure. The
next has begun when a launcher or the script reports a start, when steps are counted again from an
earlier one, or when an exception that ends a process comes again after further steps.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from everstep_services.attribution.log_analysis import clocks
from everstep_services.attribution.log_analysis.origins import Origin
from everstep_services.attribution.log_analysis.pending_work import PendingWork
from everstep_services.attribution.log_analysis.report import Failure

START_WORDS = (
    "will restart worker group", "starting worker group", "setting omp_num_threads environment",
    "starting elastic_operator", "world info dict", "initializing distributed: global_rank",
    "starting with jobenvironment", "loading checkpoint", "loaded checkpoint", "restoring states",
    "resuming from", "resuming training", "resume from", "continuing training from",
)  # fmt: skip
"""In each line that a launcher, or a script, writes when a training starts (again)."""
MOST_ATTEMPTS = 8
"""As many of the last attempts of a file are kept."""
_MOST_FAILURES = 8
_STEPS_ON = 3
_MOST_WATCHED = 4096
_START = re.compile("|".join(map(re.escape, START_WORDS)), re.IGNORECASE)
_NUMBERED = re.compile(r"(?:^|/)(?:round|attempt|cycle|restart)[-_](\d{1,6})(?=/|\.|$)")
_EPOCH = re.compile(r"(?i)\bepoch\W{0,12}(\d{1,9})\b")
_PART = re.compile(r"\b(\d{1,12})/\s{0,12}\d")

OriginKey: TypeAlias = tuple[int | None, str]
"""A rank, or a member or node where no rank is known."""
Position: TypeAlias = tuple[int, int]
"""An epoch and a step, −1 where a line counts none."""
_Sighting: TypeAlias = tuple[Failure, int, bytes | None]
"""A failure, and the number and the text of another line that reports it, if any."""


class OriginFailures:
    """The failures of one origin in one attempt: of each name the first and the last."""

    def __init__(self) -> None:
        self._first: dict[str, _Sighting] = {}
        self._last: dict[str, _Sighting] = {}
        self._less = 0
        """Those that make room for a root."""
        self.repeats: Counter[str] = Counter()
        self.cascades: Counter[str] = Counter()

    def add(self, failure: Failure, number: int, line: bytes | None = None) -> None:
        """Take a failure; `line` reports it where the failure is that of an earlier one."""
        name = failure.fingerprint
        if name in self._first:
            self._last[name] = failure, number, line
        elif len(self._first) < _MOST_FAILURES or (failure.role == "root" and self._make_room()):
            self._first[name] = failure, number, line
            self._less += failure.role != "root"
        if failure.role == "cascade":
            self.cascades[failure.failure_class] += 1
        self.repeats[name] += 1
        if len(self.repeats) > 4 * _MOST_FAILURES:
            self.repeats = Counter(dict(self.repeats.most_common(2 * _MOST_FAILURES)))

    @property
    def rules(self) -> list[str]:
        """The rules of the failures that are kept."""
        return [failure.rule for failure, _, _ in self._first.values()]

    def first(self, year: int) -> dict[str, Failure]:
        """The first failure of each name."""
        return {name: _moved(sighting, year) for name, sighting in self._first.items()}

    def last(self, name: str, year: int) -> Failure | None:
        """The last failure of this name, if it came again."""
        return _moved(self._last[name], year) if name in self._last else None

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
        name = next(name for name, (kept, _, _) in self._first.items() if kept.role != "root")
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

    def add(self, origin: Origin, name: str, line: int) -> None:
        """Take a traceback."""
        first, _ = self._lines.get((origin, name), (line, line))
        if len(self._lines) < _MOST_WATCHED:
            self._lines[origin, name] = (first, line)

    def end_file(self, file: int, steps: Mapping[Origin, Sequence[tuple[int, int]]]) -> None:
        """Compare the tracebacks of a file with the lines and numbers of its steps."""
        for (origin, _), (first, last) in self._lines.items():
            if _has_new_step(steps.get(whose(origin), ()), last):
                self.places.add((file, first))
        self._lines.clear()


@dataclass(slots=True)
class Attempt:
    """What the lines of one attempt in one file report."""

    kept: dict[OriginKey, OriginFailures] = field(default_factory=dict)
    accused: Counter[int] = field(default_factory=Counter)
    enqueued: dict[int, int] = field(default_factory=dict)
    """The last collective that each rank has entered."""
    works: dict[tuple[str, int], PendingWork] = field(default_factory=dict)
    """The collective of each group that a rank was in when it timed out first."""


class FileAttempts:
    """The attempts in one file, and what shows that another one has begun."""

    def __init__(self, path: Path | None = None) -> None:
        number = _NUMBERED.findall(path.as_posix()) if path is not None else []
        self.number = int(number[-1]) if number else None
        """The number of the file's attempt, where its name tells it."""
        self.attempts: list[Attempt] = [Attempt()]
        """The last ones."""
        self.begun = 1
        self.dropped = 0
        """The origins of attempts that are not kept."""
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
        peer: int | None,
        steps: Callable[[], Iterable[tuple[Origin, Position | None]]],
    ) -> None:
        """Take a failure that may accuse a rank; `steps` returns the positions before it."""
        if peer is not None:
            self.current.accused[peer] += 1
        if failure.role == "hint":
            return
        self._has_ended |= failure.role != "cascade"
        if not self._has_failed:
            self._has_failed, self._watched = True, 0
            self._before, self._fallen, self._further = {}, {}, Counter()
            for origin, position in steps():
                if position is not None:
                    self._before[origin] = position

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
        self.current = Attempt()
        if len(self.attempts) == MOST_ATTEMPTS:
            self.dropped += len(self.attempts.pop(0).kept)
        self.attempts.append(self.current)
        self._has_failed = self._has_ended = False
        self._uncaught.clear()


def _moved(sighting: _Sighting, year: int) -> Failure:
    """The failure as the line reports it, which is equal to the failure's but for its time."""
    failure, number, line = sighting
    if line is None:
        return failure
    text = line.decode("utf-8", "replace").strip()
    at = None if failure.at is None else clocks.seconds(text, year)
    return replace(failure, line=number, quote=text[: len(failure.quote)], at=at)


def position_of(text: str) -> Position | None:
    """The epoch and the step that a line about progress counts."""
    epoch, step = _EPOCH.search(text), clocks.step_of(text)
    if step is None and (part := _PART.search(text)):
        step = int(part[1])
    if step is None and epoch is None:
        return None
    return (int(epoch[1]) if epoch else -1, -1 if step is None else step)


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
