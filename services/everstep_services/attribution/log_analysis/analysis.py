"""Keeps the failures that the lines of each rank report.

Memory does not grow with the logs: of each rank and attempt the first and the last failures of
different names are kept, and numbers of the rest.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

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
    aligned,
    last_steps,
    step_of_line,
    whose,
)
from everstep_services.attribution.log_analysis.clocks import Clocks
from everstep_services.attribution.log_analysis.judgement import Judgement, Timing, with_end
from everstep_services.attribution.log_analysis.log_end import Tails
from everstep_services.attribution.log_analysis.origins import Origin, of_line
from everstep_services.attribution.log_analysis.pending_work import PendingWork, mismatch, work_of
from everstep_services.attribution.log_analysis.rank_ids import RankIds
from everstep_services.attribution.log_analysis.repeats import BlockEffect, RepeatedBlock
from everstep_services.attribution.log_analysis.report import EarlierAttempt, Failure, LogReport
from everstep_services.attribution.log_analysis.rules import ENDS, LogRule, LogRules, Match, Role
from everstep_services.attribution.log_analysis.tracebacks import (
    Raised,
    Traceback,
    innermost,
    links_exceptions,
)

_QUOTED = 400
_STEPS_ON = 3
_SOME_YEAR = 2000
_SUMMARY = re.compile(r"^\s*(?:exitcode|traceback)\s*:.*(?:\(pid: |by PID )(?P<pid>\d+)")
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


class LogAnalysis:
    """Takes lines of any number of files, and reports the first failure."""

    def __init__(self, rules: LogRules, world: int | None = None) -> None:
        self._rules = rules
        self._ids = RankIds(world)
        self._files: dict[int, FileAttempts] = {}
        self._kept = KeptOrigins()
        self._attempts = FileAttempts()
        """Those of the file that is read."""
        self._steps_before: Callable[[], Iterable[str]] = tuple
        self._file = Origin(0)
        self._effects: list[BlockEffect] = []
        self._is_plain = True
        """Whether the lines of a block have no meaning beyond the failures that they report."""
        self._begin_tracebacks()
        self._caught = Caught()
        self.unread: list[str] = []
        """The parts of files that could not be read."""
        self._survived: dict[int, int] = {}
        self.tails = Tails()
        self._summaries: dict[Origin, int] = {}
        self._clocks = Clocks()
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
        self._unsaid: dict[Origin, tuple[OriginFailures, Failure]] = {}
        """The exceptions whose text begins in the next line."""
        self._handled: dict[Origin, tuple[Attempt, OriginKey, Failure]] = {}
        """The exceptions whose origin has another traceback in the same chain."""

    def begin_file(
        self, file: Origin, path: Path | None, steps_before: Callable[[], Iterable[str]]
    ) -> None:
        """Begin with a file; `steps_before` returns the lines about progress before a line."""
        self._file = file
        self._attempts = self._files[file.file] = FileAttempts(path, self._kept)
        self._steps_before = steps_before

    def begin_block(self) -> None:
        """Note where a block begins that the log may repeat."""
        self._effects.clear()
        self._is_plain = not (self._summaries or self._ignored or self._handled)

    def block(self, lines: Sequence[bytes], first: int) -> RepeatedBlock | None:
        """The lines since the begin and what they report; None if they may mean more again."""
        if not self._is_plain or self._summaries or self._ignored or self._handled:
            return None
        effects = [replace(effect, after=effect.after - first) for effect in self._effects]
        return RepeatedBlock(lines, effects)

    def add_again(
        self, block: RepeatedBlock, first: int, contents: Sequence[bytes], at: int
    ) -> bool:
        """Take a repeated block that begins at `contents[at]`; False if it has to be read."""
        if self._summaries or self._ignored or self._handled:
            return False
        there = RepeatedLines(first, contents[at : at + len(block.lines)], self._year)
        for effect in block.effects:
            failure = effect.failure
            if effect.raised is not None:
                number = first + effect.after
                self._see_raised(effect.raised, failure.fingerprint, number, effect.is_uncaught)
            self._record(effect, there)
            if effect.raised is not None:
                self._raised[effect.raised] = (self._attempts.current, effect.key, failure)
        return True

    def add_run(self, run: RepeatedBlock, first: int, contents: Sequence[bytes], at: int) -> bool:
        """Take a repeated run as `add_again` takes a block, but put off what it reports."""
        if self._summaries or self._ignored or self._handled:
            return False
        if not self._attempts.see_run(run, self._steps_of_origins):
            return False
        for (origin, name), (begin, end) in run.raised.items():
            self._caught.add(origin, name, first + begin, first + end)
        attempt = self._attempts.current
        for origin, effect in run.last_raised.items():
            self._raised[origin] = (attempt, effect.key, effect.failure)
        lines = contents[at : at + len(run.lines)]
        attempt.put_off(run, RepeatedLines(first, lines, self._year))
        return True

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
        self._is_plain = False
        self._attempts.see_step(*step_of_line(line, file))

    def add_progress(self, file: Origin, lines: Sequence[tuple[int, str]]) -> None:
        """Take the last lines of a file that count steps.

        A line before three further steps did not end the training. Times that several clocks print
        for one step show the offsets of the clocks.
        """
        firsts: dict[int, int] = {}
        steps: dict[Origin, list[tuple[int, int]]] = {}
        of_origin: dict[Origin, list[int]] = {}
        for number, line in lines:
            origin, text = of_line(line, file)
            self._year = clocks.year_of(line) or self._year
            step, at = clocks.step_of(text), clocks.seconds(line, self._year)
            of_origin.setdefault(origin, []).append(number)
            if step is not None:
                steps.setdefault(whose(origin), []).append((number, step))
                firsts.setdefault(step, number)
                if at is not None:
                    self._clocks.observe(origin.clock, step, at)
        counted = [*of_origin.values(), list(firsts.values())]
        self._survived[file.file] = max(
            (numbers[-_STEPS_ON] for numbers in counted if len(numbers) >= _STEPS_ON), default=0
        )
        self._caught.end_file(file.file, steps)

    def add(self, file: Origin, number: int, line: str) -> bool:
        """Take a line. Returns whether it means anything."""
        origin, text = of_line(line, file)
        self._year = clocks.year_of(line) or self._year
        self._ids.see(origin)
        if origin in self._open and self._add_to_traceback(origin, number, line, text):
            return True
        if Traceback.begins(text):
            self._raised.pop(origin, None)
            if len(self._open) < MOST_ORIGINS:
                self._open[origin] = Traceback(is_of_end=origin not in self._ignored)
            self._ignored.discard(origin)
            if not _SUMMARY_TRACEBACK.match(text):
                self._summaries.pop(origin, None)
            return True
        return self._add_link(origin, text) or self._add_open_line(origin, number, line, text)

    def _add_link(self, origin: Origin, text: str) -> bool:
        """Whether the line tells what the traceback before or after it means."""
        if links_exceptions(text):
            self._is_plain = False
            if origin in self._raised:
                self._handled[origin] = self._raised[origin]
            return True
        if text.startswith(_IGNORED):
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
            self._summaries = {origin: rank}
            self._ids.set_local(origin.file, summary["local"], rank)
            return True
        if origin.pid and (nccl := _NCCL_RANK.search(text)):
            self._ids.set_process(origin.pid, int(nccl["rank"]))
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
            self._is_plain = False
            return True
        return bool(enqueued)

    def _add_match(self, origin: Origin, number: int, line: str, text: str, match: Match) -> None:
        rule = match.rule
        work = work_of(text) if rule.id == "nccl_timeout" and origin.rank is not None else None
        role: Role = rule.in_the_open or rule.role
        if match.is_of_kernel and origin.is_of_rank and role != "cascade":
            role = "hint"
        name = fingerprint.of_rule(rule.failure_class, match.component)
        kept, unsaid = self._unsaid.pop(origin, (None, None))
        if kept and unsaid and number == unsaid.line + 1 and rule.severity >= unsaid.severity:
            kept.forget(unsaid)  # this line is its text
            self._is_plain = False
        self._keep(origin, number, line, match, role, name, work=work)

    def _set_enqueued(self, origin: Origin, sequence: int) -> None:
        self._is_plain = False
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
        if summary := _SUMMARY.match(line):
            pid = summary["pid"]
            rank = self._summaries.get(origin, rank)
            if rank is not None:
                self._ids.set_process(pid, rank)
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
            key, failure, number, peer, origin if frames else None, is_uncaught,
            ((work[0], origin.rank), work[1]) if work and origin.rank is not None else None,
        )  # fmt: skip
        self._effects.append(effect)
        kept = self._record(effect)
        if _UNSAID.search(line):
            self._unsaid[origin], self._is_plain = (kept, failure), False
        return key, failure

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

    def report(self) -> LogReport:
        """Return the first failure of the last attempt, with its evidence."""
        numbers = aligned(list(self._files.values()))
        ordered = sorted(numbers, reverse=True)
        base = LogReport(
            verdict="nothing",
            files=tuple(self.names),
            lines=self.lines,
            ranks=len(self._ids.ranks),
            notes=tuple(self.notes),
            attempts=max(ordered, default=1),
        )
        timing = Timing(
            self._clocks.offsets(), self._clocks.latest, self._survived, self._caught.places
        )
        report = self._judged(base, numbers[ordered[0]], timing) if ordered else base
        report = with_end(report, self.tails, self._year)
        earlier = Timing(self._clocks.offsets(), None, {})
        before = [self._judged(base, numbers[number], earlier) for number in ordered[1:]]
        return report.without(self.unread).after(
            [
                EarlierAttempt.of(number, judged)
                for number, judged in zip(ordered[1:], before, strict=True)
                if judged.cause is not None
            ]
        )

    def _judged(self, base: LogReport, attempts: Sequence[Attempt], timing: Timing) -> LogReport:
        """The verdict on one attempt, by its parts in all files."""
        failures: dict[tuple[object, ...], Failure] = {}
        cascades: Counter[str] = Counter()
        accused: Counter[int] = Counter()
        enqueued: dict[int, int] = {}
        works: dict[tuple[str, int], PendingWork] = {}
        for attempt in (attempt.settled for attempt in attempts):
            accused += attempt.accused
            works |= attempt.works
            for rank, sequence in attempt.enqueued.items():
                enqueued[rank] = max(sequence, enqueued.get(rank, -1))
            for kept in attempt.kept.values():
                cascades.update(kept.cascades)
                for name, first in kept.first().items():
                    again = timing.is_outlived(first) and kept.last(name)
                    failure = self._ids.with_rank(again or first)
                    of_file = failure.file if failure.rank is None else None
                    key = (name, failure.rank, of_file, failure.member, failure.node)
                    failures.setdefault(key, failure)
        judgement = Judgement(
            [*failures.values()], accused, timing, self._ids.silent(attempts, [*accused])
        )
        base = replace(base, cascades=dict(cascades.most_common()))
        return judgement.report(base, enqueued, mismatch(works))
