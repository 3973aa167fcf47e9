"""Keeps the failures that the lines of each rank report.

Memory does not grow with the logs: of each rank and attempt the first and the last failures of
different names are kept, and numbers of the rest.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from everstep_services.attribution.log_analysis import clocks, fingerprint
from everstep_services.attribution.log_analysis.attempts import (
    MOST_ORIGINS,
    Attempt,
    Caught,
    FileAttempts,
    KeptOrigins,
    OriginFailures,
    OriginKey,
    Position,
    RepeatedLines,
    last_steps,
    step_of_line,
    whose,
)
from everstep_services.attribution.log_analysis.chunks import text_of
from everstep_services.attribution.log_analysis.log_end import Tails
from everstep_services.attribution.log_analysis.origins import Origin, of_line
from everstep_services.attribution.log_analysis.pending_work import PendingWork, work_of
from everstep_services.attribution.log_analysis.progress import LastSteps
from everstep_services.attribution.log_analysis.rank_ids import RankIds
from everstep_services.attribution.log_analysis.repeats import BlockEffect, OpenBlock, RepeatedBlock
from everstep_services.attribution.log_analysis.report import Failure
from everstep_services.attribution.log_analysis.rules import ENDS, LogRule, LogRules, Match, Role
from everstep_services.attribution.log_analysis.tracebacks import (
    Raised,
    Traceback,
    innermost,
    links_exceptions,
)

_QUOTED = 400
_SOME_YEAR = 2000
SUMMARY = re.compile(r"^\s*(?:exitcode|traceback)\s*:.*(?:\(pid: |by PID )(?P<pid>\d+)")
_SUMMARY_RANK = re.compile(r"^\s*rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_IGNORED = "Exception ignored in"
"""The line before a harmless traceback: nobody catches exceptions of Python's finalizers."""
_SUMMARY_TRACEBACK = re.compile(r"^\s*traceback\s*: Traceback")
_NCCL_RANK = re.compile(r"\brank (?P<rank>\d{1,7}) n[Rr]anks \d+")
_BARE = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): (?P<text>.*)")
_UNSAID = re.compile(r"(?:Error|Exception): *$")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")
_GENERAL = LogRule(
    id="python_exception",
    failure_class="python_exception",
    domain="user_code",
    role="root",
    severity=1,
    words=(),
    patterns=(),
    means="the script raised an exception",
    advice="Read the traceback; the same fingerprint again means that a restart will not help.",
    source="python",
)


class LineAnalysis:
    """Takes lines of any number of files."""

    def __init__(self, rules: LogRules, world: int | None = None) -> None:
        self._rules = rules
        self._ids = RankIds(world)
        self._files: dict[int, FileAttempts] = {}
        self._kept = KeptOrigins()
        self._attempts = FileAttempts()
        """Those of the file that is read."""
        self._steps_before: Callable[[], Iterable[str]] = tuple
        self._file = Origin(0)
        self._origins: dict[int, Origin] = {}
        """What the names of files say of all their lines."""
        self.at = 0
        """The index of the line that is read, in its chunk."""
        self.open_block = OpenBlock()
        self._begin_tracebacks()
        self._caught = Caught()
        self.unread: list[str] = []
        """The parts of files that could not be read."""
        self.tails = Tails()
        self._summaries: dict[Origin, int] = {}
        self._progress = LastSteps()
        self._year = _SOME_YEAR
        self.names: list[str] = []
        self.notes: list[str] = []
        self.lines = 0
        self.bytes = 0

    def _begin_tracebacks(self) -> None:
        self._open: dict[Origin, Traceback] = {}
        self._ignored: set[Origin] = set()
        """Origins whose next traceback is harmless."""
        self._raised: dict[Origin, tuple[Attempt, OriginKey, Failure]] = {}
        """The last exception of each origin."""
        self._unsaid: dict[Origin, tuple[OriginFailures, Failure, int]] = {}
        """The exceptions whose text begins in the next line."""
        self._unsaid_at = -1
        """The last line of such an exception."""
        self._handled: dict[Origin, tuple[Attempt, OriginKey, Failure]] = {}
        """The exceptions whose origin has another traceback in the same chain."""

    def begin_file(
        self, file: Origin, path: Path | None, steps_before: Callable[[], Iterable[str]]
    ) -> None:
        """Begin with a file; `steps_before` returns the lines about progress before a line."""
        self._file = self._origins[file.file] = file
        self._attempts = self._files[file.file] = FileAttempts(path, self._kept)
        self._steps_before = steps_before

    def add_again(
        self, block: RepeatedBlock, numbers: Sequence[int], contents: Sequence[bytes]
    ) -> bool:
        """Take the lines of a repeated block that fits; False if they have to be read."""
        if numbers[0] == self._unsaid_at + 1:
            return False
        there = RepeatedLines(numbers, contents, self._year)
        for effect in block.effects:
            failure = effect.failure
            if effect.raised is not None:
                number = numbers[effect.after]
                self._see_raised(effect.raised, failure.fingerprint, number, effect.is_uncaught)
            kept = self._record(effect, there)
            if effect.raised is not None:
                self._raised[effect.raised] = (self._attempts.current, effect.key, failure)
            if effect.unsaid is not None:
                self._set_unsaid(effect.unsaid, kept, failure, numbers[effect.after])
        self._add_state(block, contents)
        return True

    def _add_state(self, block: RepeatedBlock, contents: Sequence[bytes]) -> None:
        """Take what later lines need of a block besides its failures."""
        self._year = block.year or self._year
        for at, rank in block.processes:
            if summary := SUMMARY.match(text_of(contents[at])):
                self._ids.set_process(summary["pid"], rank)
        for origin in block.ended:
            self._summaries.pop(origin, None)
        if block.summaries is not None:
            self._summaries = dict(block.summaries)

    def add_run(
        self, run: RepeatedBlock, numbers: Sequence[int], contents: Sequence[bytes]
    ) -> bool:
        """Take a repeated run as `add_again` takes a block, but put off what it reports."""
        if numbers[0] == self._unsaid_at + 1 or not self.fits(run):
            return False
        if not self._attempts.see_run(run, self._steps_of_origins):
            return False
        for (origin, name), (begin, end) in run.raised.items():
            self._caught.add(origin, name, numbers[begin], numbers[end])
        attempt = self._attempts.current
        for origin, effect in run.last_raised.items():
            self._raised[origin] = (attempt, effect.key, effect.failure)
        attempt.put_off(run, RepeatedLines(numbers, contents, self._year))
        self._add_state(run, contents)
        return True

    def failure_in(self, file: Origin, there: RepeatedLines) -> Failure:
        """The failure that the last of these lines reports; nothing else was taken before."""
        self._year = there.year
        self._summaries = {at: rank for at, rank in there.origins.items() if rank is not None}
        for number, content in zip(there.numbers, there.lines, strict=True):
            self.add(file, number, text_of(content))
        return self.open_block.effects[-1].failure

    def fits(self, block: RepeatedBlock) -> bool:
        """Whether the lines of the block mean the same after what was read up to now."""
        return not any(
            rank != self._summaries.get(origin)
            or origin in self._ignored
            or origin in self._handled
            for origin, rank in block.origins.items()
        )

    def _depend(self, origin: Origin) -> None:
        """Note that the meaning of a line depends on earlier ones of its origin."""
        self.open_block.origins.setdefault(origin, self._summaries.get(origin))
        self.open_block.is_plain &= origin not in self._ignored and origin not in self._handled

    @property
    def attempt(self) -> Attempt:
        """The attempt that the next line belongs to."""
        return self._attempts.current

    @property
    def wants_steps(self) -> bool:
        """Whether the next lines about progress are needed."""
        return self._attempts.wants_steps

    def add_step(self, file: Origin, line: str) -> None:
        """Take a line about progress after a failure."""
        self.open_block.is_plain = False
        self._attempts.see_step(*step_of_line(line, file))

    def add_progress(self, file: Origin, lines: Sequence[tuple[int, str]]) -> None:
        """Take the last lines of a file that count steps."""
        steps, self._year = self._progress.add(file, lines, self._year)
        self._caught.end_file(file.file, steps)

    def add(self, file: Origin, number: int, line: str) -> bool:
        """Take a line. Returns whether it means anything."""
        origin, text = of_line(line, file)
        if year := clocks.year_of(line):
            self._year = self.open_block.year = year
        self._ids.see(origin)
        if origin in self._open and self._add_to_traceback(origin, number, line, text):
            return True
        if Traceback.begins(text):
            self._depend(origin)
            self._raised.pop(origin, None)
            if len(self._open) < MOST_ORIGINS:
                self._open[origin] = Traceback(is_of_end=origin not in self._ignored)
            self._ignored.discard(origin)
            if not _SUMMARY_TRACEBACK.match(text):
                self._summaries.pop(origin, None)
                self.open_block.ended.add(origin)
                self.open_block.is_plain &= self.open_block.summaries is None
            return True
        return self._add_link(origin, text) or self._add_open_line(origin, number, line, text)

    def _add_link(self, origin: Origin, text: str) -> bool:
        """Whether the line tells what the traceback before or after it means."""
        if links_exceptions(text):
            self.open_block.is_plain = False
            if origin in self._raised:
                self._handled[origin] = self._raised[origin]
            return True
        if text.startswith(_IGNORED):
            self.open_block.is_plain = False
            if len(self._ignored) < MOST_ORIGINS:
                self._ignored.add(origin)
            return True
        return False

    def _add_to_traceback(self, origin: Origin, number: int, line: str, text: str) -> bool:
        """Whether a line belongs to the traceback of its origin that has not ended."""
        traceback = self._open[origin]
        raised = None if Traceback.begins(text) else traceback.add(text)
        if raised is not None:
            del self._open[origin]
            if traceback.is_of_end:
                self._add_raised(origin, number, line, raised)
            return True
        if traceback.is_lost:
            del self._open[origin]
            self.open_block.is_plain = False  # its begin is the end of an exception before it
        return text[:1].isspace()  # a line of code, which may quote anything

    @property
    def has_open_traceback(self) -> bool:
        """Whether lines without words of the rules are needed, too."""
        return bool(self._open)

    def end_file(self) -> None:
        """Forget tracebacks that have not ended."""
        self._begin_tracebacks()

    def _add_open_line(self, origin: Origin, number: int, line: str, text: str) -> bool:
        if enqueued := _ENQUEUED.search(text):
            self._set_enqueued(origin, int(enqueued[1]))
        if summary := _SUMMARY_RANK.match(text):
            rank = int(summary["rank"][:7])
            self._summaries, self.open_block.summaries = {origin: rank}, {origin: rank}
            self._ids.set_local(origin.file, summary["local"], rank)
            return True
        if origin.pid and (nccl := _NCCL_RANK.search(text)):
            self._ids.set_process(origin.pid, int(nccl["rank"]))
            self.open_block.is_plain = False
            return True
        match = self._rules.match(text)
        if match is not None:
            self._add_match(origin, number, line, text, match)
            return True
        if bare := _BARE.match(text):
            name = fingerprint.of_exception(bare["kind"], "", bare["text"])
            self._keep(origin, number, line, Match(_GENERAL, {}), "weak", name)
            return True
        if self._attempts.see_start(text):
            self.open_block.is_plain = False
            return True
        return bool(enqueued)

    def _add_match(self, origin: Origin, number: int, line: str, text: str, match: Match) -> None:
        rule = match.rule
        work = work_of(text) if rule.id == "nccl_timeout" and origin.rank is not None else None
        role: Role = rule.in_the_open or rule.role
        if match.is_of_kernel and origin.is_of_rank and role != "cascade":
            role = "hint"
        name = fingerprint.of_rule(rule.failure_class, match.component)
        kept, unsaid, at = self._unsaid.pop(origin, (None, None, 0))
        if kept and unsaid and number == at + 1 and rule.severity >= unsaid.severity:
            kept.forget(unsaid)  # this line is its text
            self.open_block.is_plain = False
        self._keep(origin, number, line, match, role, name, work=work)

    def _set_enqueued(self, origin: Origin, sequence: int) -> None:
        self.open_block.is_plain = False
        enqueued = self._attempts.current.enqueued
        if origin.rank is not None and len(enqueued) < MOST_ORIGINS:
            enqueued[origin.rank] = max(sequence, enqueued.get(origin.rank, -1))

    def _add_raised(self, origin: Origin, number: int, line: str, raised: Raised) -> None:
        kind = raised.kind.rpartition(".")[2]
        text = f"{kind}: {raised.message}" if raised.message else kind
        match = self._rules.match(text)
        if match is None or match.rule.failure_class in ENDS:
            match = Match(_GENERAL, {})
        name = fingerprint.of_exception(kind, innermost(raised.frames), raised.message)
        is_uncaught = raised.is_uncaught and origin not in self._handled
        self._see_raised(origin, name, number, is_uncaught)
        frames = tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in raised.frames)
        key, failure = self._keep(
            origin, number, line, match, match.rule.role, name, frames, is_uncaught=is_uncaught
        )
        if origin in self._handled:
            attempt, of_before, before = self._handled.pop(origin)
            if before.role != "cascade" and before.severity <= failure.severity:
                attempt.settled.forget(of_before, before)
        if len(self._raised) < MOST_ORIGINS:
            self._raised[origin] = (self._attempts.current, key, failure)

    def _keep(  # noqa: PLR0913
        self,
        origin: Origin,
        number: int,
        line: str,
        match: Match,
        role: Role,
        name: str,
        frames: tuple[str, ...] = (),
        *,
        is_uncaught: bool = False,
        work: tuple[str, PendingWork] | None = None,
    ) -> tuple[OriginKey, Failure]:
        rank, groups = origin.rank, match.groups
        if "rank" in groups:
            rank = int(groups["rank"][:7])
        if frames and rank is None:
            rank = self._summaries.get(origin)
        pid = groups.get("pid", "") or origin.pid
        if summary := SUMMARY.match(line):
            pid = summary["pid"]
            self._depend(origin)
            rank = self._summaries.get(origin, rank)
            if rank is not None:
                self._ids.set_process(pid, rank)
                self.open_block.processes.append((self.at, rank))
        failure = Failure(
            failure_class=match.rule.failure_class,
            domain=match.rule.domain,
            rule=match.rule.id,
            role=role,
            severity=match.rule.severity,
            means=match.rule.means,
            advice=match.rule.advice,
            source=match.rule.source,
            fingerprint=name,
            rank=rank,
            member=origin.member,
            node=groups.get("node", "") or origin.node,
            file=origin.file,
            line=number,
            at=clocks.seconds(line, self._year),
            clock=groups.get("node", "") or origin.clock,
            quote=line.strip()[:_QUOTED],
            frames=frames,
            pid=pid,
        )
        unknown = groups.get("node", "") or origin.member or origin.node
        peer = int(groups["peer"][:7]) if "peer" in groups else None
        key = (rank, unknown if rank is None else "")
        effect = BlockEffect(
            key, failure, self.at, 0, peer, origin if frames else None, is_uncaught,
            ((work[0], origin.rank), work[1]) if work and origin.rank is not None else None,
            origin if _UNSAID.search(line) else None,
        )  # fmt: skip
        self.open_block.effects.append(effect)
        kept = self._record(effect)
        if effect.unsaid is not None:
            self._set_unsaid(origin, kept, failure, number)
        return key, failure

    def _set_unsaid(
        self, origin: Origin, kept: OriginFailures, failure: Failure, number: int
    ) -> None:
        self._unsaid[origin], self._unsaid_at = (kept, failure, number), number

    def _record(self, effect: BlockEffect, there: RepeatedLines | None = None) -> OriginFailures:
        """Note that a line reports a failure: `there`, or where it was read."""
        kept = self._attempts.current.settled.add(effect, there)
        self._attempts.see(effect.failure, self._steps_of_origins)
        return kept

    def _see_raised(self, origin: Origin, name: str, number: int, is_uncaught: bool) -> None:
        """Note an exception before it is kept: it may show that another attempt has begun."""
        if is_uncaught:
            self._attempts.see_uncaught(whose(origin), name)
        self._caught.add(origin, name, number)

    def _steps_of_origins(self) -> Mapping[Origin, Position]:
        return last_steps(tuple(self._steps_before()), self._file)
