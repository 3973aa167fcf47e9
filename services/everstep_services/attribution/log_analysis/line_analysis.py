"""Keeps the failures that the lines of each rank report.

Memory does not grow with the logs: of each rank and attempt the first and the last failures of
different names are kept, and numbers of the rest.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from everstep_services.attribution.log_analysis import clocks, fingerprint
from everstep_services.attribution.log_analysis.attempts import (
    MOST_ORIGINS,
    Caught,
    FailureKind,
    FileAttempts,
    KeptOrigins,
    OriginFailures,
    Role,
    Sighting,
    last_steps,
    step_of_line,
)
from everstep_services.attribution.log_analysis.chunks import text_of
from everstep_services.attribution.log_analysis.file_lines import (
    FileLine,
    TracebackLines,
    TracebackMemory,
)
from everstep_services.attribution.log_analysis.line_templates import LineTemplates
from everstep_services.attribution.log_analysis.log_end import Tails
from everstep_services.attribution.log_analysis.origins import ANY_FILE, Origin, of_line
from everstep_services.attribution.log_analysis.parsed_line import ENQUEUED, SUMMARY, ParsedLine
from everstep_services.attribution.log_analysis.progress import LastSteps
from everstep_services.attribution.log_analysis.rank_ids import RankIds
from everstep_services.attribution.log_analysis.report import Failure
from everstep_services.attribution.log_analysis.rules import LogRules, Match
from everstep_services.attribution.log_analysis.tracebacks import Traceback, frame_of

_QUOTED = 400
_SOME_YEAR = 2000
_MOST_LINES = 8192


class LineAnalysis:
    """Takes lines of any number of files."""

    def __init__(self, rules: LogRules, world: int | None = None) -> None:
        self.rules = rules
        self._templates = LineTemplates(rules)
        self._lines: dict[object, FileLine] = {}
        """What is known of lines in the file that is read, by their meanings."""
        self.contents: Sequence[bytes] = ()
        self.numbers: Sequence[int] = ()
        """The lines of the chunk that is read."""
        self._ids = RankIds(world)
        self._files: dict[int, FileAttempts] = {}
        self._kept = KeptOrigins()
        self.attempts = FileAttempts()
        """Those of the file that is read."""
        self._file = Origin(0)
        self._origins: dict[int, Origin] = {}
        """What the names of files say of all their lines."""
        self._memory = TracebackMemory()
        self.begun = self.ended = -1
        """The indices of the lines with which a traceback began and ended last."""
        self._begin_tracebacks()
        self._caught = Caught()
        self.unread: list[str] = []
        """The parts of files that could not be read."""
        self.tails = Tails()
        self._summaries: dict[Origin, int] = {}
        self._progress = LastSteps()
        self._year: int | bytes = _SOME_YEAR
        self.names: list[str] = []
        self.notes: list[str] = []
        self.lines = self.bytes = 0

    def _begin_tracebacks(self) -> None:
        self.open: dict[Origin, Traceback[bytes]] = {}
        """The tracebacks that have not ended: lines without words of the rules are needed, too."""
        self._ignored: set[Origin] = set()
        """Origins whose next traceback is harmless."""
        self._raised: dict[Origin, tuple[FailureKind, OriginFailures]] = {}
        """The last exception of each origin."""
        self._unsaid: dict[Origin, tuple[FailureKind, OriginFailures, int]] = {}
        """The exceptions whose text begins in the next line."""
        self._handled: dict[Origin, tuple[FailureKind, OriginFailures]] = {}
        """The exceptions whose origin has another traceback in the same chain."""

    def begin_file(
        self, file: Origin, path: Path | None, steps_before: Callable[[int], Iterable[str]]
    ) -> None:
        """Begin with a file; `steps_before` returns the lines about progress before a line."""
        self._file = self._origins[file.file] = file
        self.attempts = self._files[file.file] = FileAttempts(
            path, self._kept, self._caught, lambda at: last_steps(tuple(steps_before(at)), file)
        )
        self._lines.clear()
        self._memory.clear()

    def end_file(self, progress: Sequence[tuple[int, str]]) -> None:
        """End with a file; `progress` are its last lines that count steps."""
        self._begin_tracebacks()
        self.attempts.current.settle()
        steps, self._year = self._progress.add(self._file, progress, int(self._year))
        self._caught.end_file(self._file.file, steps)

    def begin_chunk(self, contents: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Begin with a chunk of the file."""
        self.contents, self.numbers = contents, numbers
        self.ended = -1
        for traceback in self.open.values():
            traceback.begin = -1

    def add_step(self, line: str) -> None:
        """Take a line about progress after a failure."""
        self.attempts.see_step(*step_of_line(line, self._file))

    def lines_of(self, contents: Sequence[bytes]) -> Sequence[FileLine | None]:
        """What is known of many lines."""
        return list(map(self._lines.get, self._templates.of_lines(contents)))

    def line_of(self, content: bytes) -> FileLine:
        """What a line means."""
        meaning = self._templates.meaning(content)
        line = self._lines.get(meaning)
        if line is None:
            line = FileLine(meaning, meaning.whose.within(self._file))
            self._ids.see(line.origin)
            if meaning.is_shared:
                if len(self._lines) >= _MOST_LINES:
                    self._lines.clear()
                    self._memory.clear()
                self._lines[meaning] = line
        return line

    def add(self, line: FileLine, at: int, content: bytes) -> bool:
        """Take a line, or a part of one; `at` is its index in the chunk.

        Returns whether it means anything.
        """
        meaning, origin = line.meaning, line.origin
        if meaning.is_dated:
            self._see_year(meaning, content)
        traceback = self.open.get(origin)
        if traceback is not None and self._add_within(traceback, line, at, content):
            return True
        if meaning.is_enqueued:
            self._set_enqueued(origin, content)
        if meaning.kind == "failure":
            self._add_failure(line, at, content)
        elif meaning.kind != "nothing":
            self._add_other(meaning, origin, at, content)
        return meaning.means

    def _add_within(
        self, traceback: Traceback[bytes], line: FileLine, at: int, content: bytes
    ) -> bool:
        """Whether a line belongs to the traceback of its origin that has not ended."""
        meaning, origin = line.meaning, line.origin
        if meaning.kind != "traceback" and traceback.take(meaning.within, content):
            del self.open[origin]
            if traceback.begin >= 0:
                self.begun, self.ended = traceback.begin, at
            if traceback.is_of_end:
                frames = traceback.sources
                self._add_raised(line, traceback.innermost, traceback.is_uncaught, frames, at)
            return True
        if traceback.is_lost:
            del self.open[origin]
        return meaning.is_indented  # a line of code, which may quote anything

    def _see_year(self, meaning: ParsedLine, content: bytes) -> None:
        if meaning.year_at is None:
            self._year = meaning.year or self._year
        elif content[meaning.year_at] > b"1970":
            self._year = content[meaning.year_at]

    def find_again(self, lines: Sequence[FileLine | None], at: int) -> TracebackLines | None:
        """The traceback that begins with a line, if it came before and means the same."""
        return None if self._ignored else self._memory.find(lines, at)

    def add_again(self, again: TracebackLines, lines: Sequence[FileLine | None], at: int) -> None:
        """Take a traceback that came before."""
        head, contents = lines[at], self.contents
        assert head is not None
        self.open.pop(head.origin, None)
        self._raised.pop(head.origin, None)
        if self._summaries and not head.meaning.is_summary_traceback:
            self._summaries.pop(head.origin, None)
        for date in again.dates:
            line = lines[at + date]
            assert line is not None
            self._see_year(line.meaning, contents[at + date])
        frames = [contents[at + frame] for frame in again.frames]
        self._add_raised(again.last, again.function, again.is_uncaught, frames, at + again.size - 1)

    def remember(self, lines: Sequence[FileLine | None]) -> None:
        """Remember the lines of the traceback that ended last."""
        self._memory.add(lines[self.begun : self.ended + 1])

    def _add_other(self, meaning: ParsedLine, origin: Origin, at: int, content: bytes) -> None:
        """Take a line that tells something else than a failure, outside of a traceback."""
        match meaning.kind:
            case "traceback":
                self._begin_traceback(meaning, origin, at)
            case "link":
                self._link(origin)
            case "ignored":
                self._ignore(origin)
            case "start":
                self.attempts.see_start()
            case "rank" | "nccl_rank":
                self._add_rank(meaning, origin, content)
            case "nothing" | "failure":
                pass

    def _link(self, origin: Origin) -> None:
        """Note that the exception before this line has another one in its chain."""
        if origin in self._raised:
            self._handled[origin] = self._raised[origin]

    def _ignore(self, origin: Origin) -> None:
        if len(self._ignored) < MOST_ORIGINS:
            self._ignored.add(origin)

    def _begin_traceback(self, meaning: ParsedLine, origin: Origin, at: int) -> None:
        self._raised.pop(origin, None)
        if len(self.open) < MOST_ORIGINS:
            self.open[origin] = Traceback(at, is_of_end=origin not in self._ignored)
        self._ignored.discard(origin)
        if not meaning.is_summary_traceback:
            self._summaries.pop(origin, None)

    def _add_rank(self, meaning: ParsedLine, origin: Origin, content: bytes) -> None:
        """Take a line that tells the rank of a process, or the one that torchrun reports on."""
        assert meaning.rank is not None
        if meaning.kind == "rank":
            self._summaries = {origin: meaning.rank}
            self._ids.set_local(origin.file, meaning.local, meaning.rank)
        else:
            process, _ = of_line(text_of(content), ANY_FILE)
            self._ids.set_process(process.pid, meaning.rank)

    def _set_enqueued(self, origin: Origin, content: bytes) -> None:
        enqueued = self.attempts.current.enqueued
        match = ENQUEUED.search(text_of(content))
        if match and origin.rank is not None and len(enqueued) < MOST_ORIGINS:
            enqueued[origin.rank] = max(int(match[1]), enqueued.get(origin.rank, -1))

    def _add_failure(self, line: FileLine, at: int, content: bytes) -> None:
        meaning, origin = line.meaning, line.origin
        if self._unsaid and not meaning.is_bare:
            unsaid, kept, number = self._unsaid.pop(origin, (None, None, 0))
            assert meaning.match is not None
            is_next = self.numbers[at] == number + 1
            if unsaid and kept and is_next and meaning.match.rule.severity >= unsaid.severity:
                kept.forget(unsaid)  # this line is its text
        rank = self._summaries.get(origin)
        kind = line.kinds.get(rank)
        if kind is None:
            kind = line.kinds[rank] = self._kind_of(line, rank)
        self._keep(kind, meaning, at, content)

    def _add_raised(
        self,
        line: FileLine,
        function: str,
        is_uncaught: bool,
        frames: Sequence[bytes],
        at: int,
    ) -> None:
        """Take the exception of a traceback."""
        origin = line.origin
        is_uncaught = is_uncaught and origin not in self._handled
        of_kind = (function, is_uncaught, self._summaries.get(origin))
        kind = line.kinds.get(of_kind)
        if kind is None:
            kind = line.kinds[of_kind] = self._kind_of_raised(line, *of_kind)
        if is_uncaught:
            self.attempts.see_uncaught(kind)
        self._keep(kind, line.meaning, at, self.contents[at], frames)
        if origin in self._handled:
            before, kept = self._handled.pop(origin)
            if before.role != "cascade" and before.severity <= kind.severity:
                kept.forget(before)
        if len(self._raised) < MOST_ORIGINS:
            self._raised[origin] = (kind, kind.kept)

    def _keep(
        self,
        kind: FailureKind,
        meaning: ParsedLine,
        at: int,
        content: bytes,
        frames: Sequence[bytes] = (),
    ) -> None:
        """Note that a line reports a failure."""
        if meaning.is_summary and (summary := SUMMARY.match(text_of(content))):
            rank, _ = kind.key
            self._ids.set_process(summary["pid"], rank)
        self.attempts.see(kind, (self.numbers[at], content, self._year, frames), at)
        if meaning.is_unsaid:
            self._unsaid[kind.origin] = (kind, kind.kept, self.numbers[at])

    def _kind_of(self, line: FileLine, of_summary: int | None) -> FailureKind:
        """The failure that a line reports outside of a traceback."""
        meaning, origin = line.meaning, line.origin
        assert meaning.match is not None
        role = meaning.role
        if meaning.match.is_of_kernel and origin.is_of_rank and role != "cascade":
            role = "hint"
        rank = _rank_of(meaning.match, origin)
        if meaning.is_summary and of_summary is not None:
            rank = of_summary
        kind = _kind(meaning.match, origin, rank, role, meaning.name)
        if meaning.work_group is not None and origin.rank is not None:
            kind.work = (meaning.work_group, origin.rank)
        return kind

    def _kind_of_raised(
        self, line: FileLine, function: str, is_uncaught: bool, of_summary: int | None
    ) -> FailureKind:
        """The failure that a line reports as the exception of a traceback."""
        match, exception, text = line.meaning.raised
        rank = _rank_of(match, line.origin)
        if of_summary is not None and (rank is None or line.meaning.is_summary):
            rank = of_summary
        name = fingerprint.of_normalised(exception, function, text)
        kind = _kind(match, line.origin, rank, match.rule.role, name)
        kind.is_raised, kind.is_uncaught = True, is_uncaught
        return kind

    def failure_of(self, sighting: Sighting) -> Failure:
        """The failure with all that its lines tell of it."""
        kind, (number, content, year, places) = sighting
        file = self._origins[kind.origin.file]
        meaning = ParsedLine(self.rules, content)
        match = meaning.raised[0] if kind.is_raised else meaning.match
        assert match is not None
        line, origin, groups = text_of(content), meaning.whose.within(file), match.groups
        summary = SUMMARY.match(line)
        frames = [frame_of(of_line(text_of(frame), file)[1]) for frame in places]
        return Failure(
            failure_class=kind.failure_class,
            domain=match.rule.domain,
            rule=kind.rule,
            role=kind.role,
            severity=kind.severity,
            means=match.rule.means,
            advice=match.rule.advice,
            source=match.rule.source,
            fingerprint=kind.name,
            rank=kind.key[0],
            member=origin.member,
            node=groups.get("node", "") or origin.node,
            file=origin.file,
            line=number,
            at=clocks.seconds(line, int(year)),
            clock=groups.get("node", "") or origin.clock,
            quote=line.strip()[:_QUOTED],
            frames=tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in frames),
            pid=summary["pid"] if summary else groups.get("pid", "") or meaning.pid,
        )


def _rank_of(match: Match, origin: Origin) -> int | None:
    return int(match.groups["rank"][:7]) if "rank" in match.groups else origin.rank


def _kind(match: Match, origin: Origin, rank: int | None, role: Role, name: str) -> FailureKind:
    rule, groups = match.rule, match.groups
    unknown = groups.get("node", "") or origin.member or origin.node
    return FailureKind(
        key=(rank, unknown if rank is None else ""),
        origin=origin,
        rule=rule.id,
        failure_class=rule.failure_class,
        severity=rule.severity,
        role=role,
        name=name,
        peer=int(groups["peer"][:7]) if "peer" in groups else None,
    )
