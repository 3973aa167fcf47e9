"""What is kept of each rank's lines, and which failure began it: by causes first, then by clocks.

What is kept does not grow with the logs: of each rank the first failures of different names, and
numbers of the rest.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from everstep_services.attribution.log_analysis import clocks, fingerprint
from everstep_services.attribution.log_analysis.clocks import ZONE_S, Clocks, Moment, Offset
from everstep_services.attribution.log_analysis.origins import Origin, of_line
from everstep_services.attribution.log_analysis.report import Failure, LogReport
from everstep_services.attribution.log_analysis.rules import LogRule, LogRules, Match, Role
from everstep_services.attribution.log_analysis.tracebacks import Raised, Traceback, innermost

_MOST_ORIGINS = 20_000
_MOST_FAILURES = 8
_MOST_PROCESSES = 20_000
_QUOTED = 400
_FOLLOWING_ALIKE = 4
_MANY_ALIKE = 3
_STEPS_ON = 3
_SURELY_FIRST_S = 1.0
_SOME_YEAR = 2000
_OTHER_YEAR_S = 300 * 86400.0
"""So far apart are times only where one of them has no year."""
_SUMMARY = re.compile(r"^\s*(?:exitcode|traceback)\s*:.*(?:\(pid: |by PID )(?P<pid>\d+)")
_SUMMARY_RANK = re.compile(r"^\s*rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_IGNORED = "Exception ignored in"
"""Before a traceback that ends nothing: Python's finalizers raise into nowhere."""
_SUMMARY_TRACEBACK = re.compile(r"^\s*traceback\s*: Traceback")
_NCCL_RANK = re.compile(r"\brank (?P<rank>\d{1,7}) n[Rr]anks \d+")
_LOCAL = re.compile(r"(\d{1,4})$")
_BARE = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): (?P<text>.*)")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")
_ENDS = frozenset({"exited", "aborted"})
"""Classes of a launcher's line that only says that a process ended."""
_WAITED = frozenset({"collective_timeout", "rendezvous", "nccl_error"})
"""Classes of what ranks write that wait for, or lose, another."""
_BY_OTHERS = frozenset({"launcher_ends_ranks", "launcher_saw_kill", "launcher_saw_exit", "aborted"})
"""Rules of lines that others write about a rank."""
_GENERAL = LogRule(
    id="python_exception",
    failure_class="python_exception",
    domain="user code",
    role="root",
    severity=1,
    words=(),
    patterns=(),
    means="the script raised an exception",
    advice="Read the traceback; the same fingerprint again means that a restart will not help.",
    source="python",
)


class _Kept:
    """What is kept of one origin."""

    def __init__(self) -> None:
        self.failures: dict[str, Failure] = {}
        self.repeats: Counter[str] = Counter()
        self.cascades: Counter[str] = Counter()

    def add(self, failure: Failure) -> None:
        if failure.role == "cascade":
            self.cascades[failure.failure_class] += 1
        self.repeats[failure.fingerprint] += 1
        is_new = failure.fingerprint not in self.failures
        if is_new and len(self.failures) < _MOST_FAILURES:
            self.failures[failure.fingerprint] = failure
        elif is_new and failure.role == "root":
            self._make_room(failure)
        if len(self.repeats) > 4 * _MOST_FAILURES:
            self.repeats = Counter(dict(self.repeats.most_common(2 * _MOST_FAILURES)))

    def _make_room(self, failure: Failure) -> None:
        for name, kept in self.failures.items():
            if kept.role != "root":
                del self.failures[name]
                self.failures[failure.fingerprint] = failure
                return


class LogAnalysis:
    """Takes lines of any number of files, and says what failed first."""

    def __init__(self, rules: LogRules, world: int | None = None) -> None:
        self._rules = rules
        self._world = world
        self._origins: dict[tuple[int | None, int, str], _Kept] = {}
        self._open: dict[Origin, Traceback] = {}
        self._ignored: set[Origin] = set()
        """Whose next traceback ends nothing."""
        self._survived: dict[int, int] = {}
        self._processes: dict[str, int] = {}
        self._summaries: dict[Origin, int] = {}
        self._accused: Counter[int] = Counter()
        self._ranks: set[int] = set()
        self._enqueued: dict[int, int] = {}
        self._locals: dict[tuple[int, str], int] = {}
        self._clocks = Clocks()
        self._year = _SOME_YEAR
        self._tasks_are_ranks = True
        self._last_task = 0
        self.names: list[str] = []
        self.notes: list[str] = []
        self.lines = 0
        self.bytes = 0

    def add_progress(self, file: Origin, lines: Sequence[tuple[int, str]]) -> None:
        """Take the last lines of a file that count steps.

        What stood before three further steps ended nothing. What clocks print at one moment tells
        their offsets.
        """
        firsts: dict[int, int] = {}
        of_origin: dict[Origin, list[int]] = {}
        for number, line in lines:
            origin, text = of_line(line, file)
            self._year = clocks.year_of(line) or self._year
            step, at = clocks.step_of(text), clocks.seconds(line, self._year)
            of_origin.setdefault(origin, []).append(number)
            if step is not None:
                firsts.setdefault(step, number)
                if at is not None:
                    self._clocks.observe(origin.clock, step, at)
        counted = [*of_origin.values(), list(firsts.values())]
        self._survived[file.file] = max(
            (numbers[-_STEPS_ON] for numbers in counted if len(numbers) >= _STEPS_ON), default=0
        )

    def add(self, file: Origin, number: int, line: str) -> bool:
        """Take a line; whether it means anything."""
        origin, text = of_line(line, file)
        self._year = clocks.year_of(line) or self._year
        self._note_rank(origin)
        if origin in self._open and self._add_to_traceback(origin, number, line, text):
            return True
        if Traceback.begins(text):
            if len(self._open) < _MOST_ORIGINS:
                self._open[origin] = Traceback(is_of_end=origin not in self._ignored)
            self._ignored.discard(origin)
            if not _SUMMARY_TRACEBACK.match(text):
                self._summaries.pop(origin, None)
            return True
        if text.startswith(_IGNORED):
            if len(self._ignored) < _MOST_ORIGINS:
                self._ignored.add(origin)
            return True
        return self._add_open_line(origin, number, line, text)

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
    def _has_rank_tasks(self) -> bool:
        """Whether srun's tasks are the ranks: no line says otherwise; no rank is beyond them."""
        return self._tasks_are_ranks and max(self._locals.values(), default=0) <= self._last_task

    def _note_rank(self, origin: Origin) -> None:
        task = origin.member.removeprefix("task ") if origin.member.startswith("task ") else ""
        if task:
            self._last_task = max(self._last_task, int(task))
        if origin.rank is not None and len(self._ranks) < _MOST_ORIGINS:
            self._ranks.add(origin.rank)
            self._tasks_are_ranks &= not task or int(task) == origin.rank

    @property
    def has_open_traceback(self) -> bool:
        """Whether lines without any word are needed."""
        return bool(self._open)

    def end_file(self) -> None:
        """Forget tracebacks that have not ended."""
        self._open.clear()
        self._ignored.clear()

    def _add_open_line(self, origin: Origin, number: int, line: str, text: str) -> bool:
        if enqueued := _ENQUEUED.search(text):
            self._set_enqueued(origin.rank, int(enqueued[1]))
        if summary := _SUMMARY_RANK.match(text):
            rank = int(summary["rank"][:7])
            self._summaries = {origin: rank}
            if len(self._locals) < _MOST_ORIGINS:
                self._locals[origin.file, summary["local"]] = rank
            return True
        if origin.pid and (nccl := _NCCL_RANK.search(text)):
            self._set_process(origin.pid, int(nccl["rank"]))
            return True
        match = self._rules.match(text)
        if match is not None:
            rule = match.rule
            role: Role = rule.in_the_open or rule.role
            name = fingerprint.of_rule(rule.failure_class, match.component)
            self._keep(origin, number, line, match, role, name, ())
            return True
        if bare := _BARE.match(text):
            name = fingerprint.of_exception(bare["kind"], "", bare["text"])
            self._keep(origin, number, line, Match(_GENERAL, {}), "weak", name, ())
            return True
        return bool(enqueued)

    def _set_enqueued(self, rank: int | None, sequence: int) -> None:
        if rank is not None and len(self._enqueued) < _MOST_ORIGINS:
            self._enqueued[rank] = max(sequence, self._enqueued.get(rank, -1))

    def _set_process(self, pid: str, rank: int) -> None:
        if len(self._processes) < _MOST_PROCESSES:
            self._processes[pid] = rank

    def _add_raised(self, origin: Origin, number: int, line: str, raised: Raised) -> None:
        kind = raised.kind.rpartition(".")[2]
        text = f"{kind}: {raised.message}" if raised.message else kind
        match = self._rules.match(text) or Match(_GENERAL, {})
        name = fingerprint.of_exception(kind, innermost(raised.frames), raised.message)
        frames = tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in raised.frames)
        self._keep(origin, number, line, match, match.rule.role, name, frames)

    def _keep(  # noqa: PLR0913
        self,
        origin: Origin,
        number: int,
        line: str,
        match: Match,
        role: Role,
        name: str,
        frames: tuple[str, ...],
    ) -> None:
        rank, groups = origin.rank, match.groups
        if "rank" in groups:
            rank = int(groups["rank"][:7])
        if "peer" in groups:
            self._accused[int(groups["peer"][:7])] += 1
        if frames and rank is None:
            rank = self._summaries.get(origin)
        pid = groups.get("pid", "") or origin.pid
        if summary := _SUMMARY.match(line):
            pid = summary["pid"]
            rank = self._summaries.get(origin, rank)
            if rank is not None:
                self._set_process(pid, rank)
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
        whose = groups.get("node", "") or origin.member or origin.node
        key = (rank, -1 if rank is not None else origin.file, whose if rank is None else "")
        if key not in self._origins and len(self._origins) >= _MOST_ORIGINS:
            key = (None, origin.file, "")
        self._origins.setdefault(key, _Kept()).add(failure)

    # --- the verdict ---

    def report(self) -> LogReport:
        """What failed first, with what speaks for it."""
        failures = [
            failure for kept in self._origins.values() for failure in kept.failures.values()
        ]
        cascades: Counter[str] = Counter()
        for kept in self._origins.values():
            cascades.update(kept.cascades)
        base = LogReport(
            verdict="nothing",
            files=tuple(self.names),
            lines=self.lines,
            ranks=len(self._ranks),
            cascades=dict(cascades.most_common()),
            notes=tuple(self.notes),
        )
        failures = [self._with_rank(failure) for failure in failures]
        timing = Timing(self._clocks.offsets(), self._clocks.latest, self._survived)
        return Judgement(failures, self._accused, timing, self._silent()).report(
            base, self._enqueued
        )

    def _with_rank(self, failure: Failure) -> Failure:
        """The failure with its rank, where a process, a local rank or a task says which it is."""
        if failure.rank is not None:
            return failure
        rank = self._processes.get(failure.pid)
        if rank is None and (local := _LOCAL.search(failure.member)):
            rank = self._locals.get((failure.file, local[1]))
            if rank is None and failure.member.startswith("task ") and self._has_rank_tasks:
                rank = int(local[1])
        return failure if rank is None else failure.of_rank(rank)

    def _silent(self) -> tuple[int, ...]:
        """Return the ranks without any line, up to the highest known rank."""
        failed = {
            rank
            for (rank, _, _), kept in self._origins.items()
            if rank is not None
            and any(failure.rule not in _BY_OTHERS for failure in kept.failures.values())
        }
        world = self._world or max([*self._ranks, *self._accused, 0]) + 1
        if len(failed) < max(2, world - 2):
            return ()
        return tuple(rank for rank in range(world) if rank not in failed)


class Timing:
    """What clocks and lines tell of the order of failures: a hint, never more than causes."""

    def __init__(
        self, offsets: Mapping[str, Offset], latest_step: float | None, survived: Mapping[int, int]
    ) -> None:
        self._offsets = offsets
        self._latest_step = latest_step
        self._survived = survived

    def is_outlived(self, failure: Failure) -> bool:
        """Whether training went on after it: by lines of its file, or by days."""
        if failure.line <= self._survived.get(failure.file, 0):
            return True
        if failure.at is None or self._latest_step is None or self._survived.get(failure.file):
            return False
        return ZONE_S < self._latest_step - failure.at < _OTHER_YEAR_S

    def earliest(self, failures: Sequence[Failure]) -> list[Failure]:
        """Without those that were certainly later than another."""
        moments = {
            number: Moment(failure.clock, failure.at)
            for number, failure in enumerate(failures)
            if failure.at is not None
        }
        earliest = clocks.Earliest(moments.values(), self._offsets)
        return [
            failure
            for number, failure in enumerate(failures)
            if number not in moments or not earliest.is_before(moments[number], _SURELY_FIRST_S)
        ]


class Judgement:
    """Weighs failures against each other."""

    def __init__(
        self,
        failures: Sequence[Failure],
        accused: Counter[int],
        timing: Timing,
        silent: tuple[int, ...],
    ) -> None:
        self._accused = accused
        self._timing = timing
        self._silent = silent
        self._failures = failures
        self._roots = [failure for failure in failures if failure.role == "root"]
        self._weak = [failure for failure in failures if failure.role == "weak"]
        self._cascades = [failure for failure in failures if failure.role == "cascade"]
        self._alike = _ranks_alike(self._roots)

    def report(self, base: LogReport, enqueued: dict[int, int]) -> LogReport:
        """The verdict."""
        if roots := self._lasting(self._roots):
            return self._of_roots(base, roots, 0.95)
        if (judged := self._by_others(base, enqueued)) is not None:
            return judged
        lasting = self._lasting(self._weak)
        if weak := [failure for failure in lasting if failure.failure_class not in _ENDS] or [
            failure for failure in lasting if failure.failure_class == "aborted"
        ]:
            return self._of_weak(base, weak)
        return self._without_cause(base)

    def _by_others(self, base: LogReport, enqueued: dict[int, int]) -> LogReport | None:
        """The rank that the others point to, or that alone is silent; None where there is none."""
        if not self._weak + self._cascades:
            return None
        if (behind := _furthest_behind(enqueued)) is not None:
            return self._of_rank(base, behind, "entered fewer collectives than the others")
        if self._accused and (named := _only_top(self._accused)) is not None:
            return self._of_rank(base, named, f"{self._accused[named]} lines accuse it")
        if 1 <= len(self._silent) <= 2:
            return self._of_rank(
                base, self._silent[0], "the others lost it; it wrote nothing about an end"
            )
        return None

    def _lasting(self, failures: Iterable[Failure]) -> list[Failure]:
        """Without those that training outlived."""
        return [failure for failure in failures if not self._timing.is_outlived(failure)]

    def _of_roots(self, base: LogReport, roots: list[Failure], confidence: float) -> LogReport:
        first = self._first(roots)
        alike = [root for root in roots if root.fingerprint == first.fingerprint]
        others = _distinct([root for root in roots if root.fingerprint != first.fingerprint])
        earliest = self._timing.earliest(alike)
        if len(earliest) == 1 and len(alike) > 1:
            first, alike = earliest[0], earliest
        rank_known = len(alike) == 1 or _are_ordered(alike)
        if others and others[0].failure_class != first.failure_class:
            confidence -= 0.15 if first.severity > others[0].severity else 0.25
        ranks = tuple(sorted({root.rank for root in alike if root.rank is not None}))
        missing: tuple[str, ...] = ()
        if not rank_known and len(ranks) > 1:
            missing = ("which of the ranks was first: their clocks cannot be compared",)
        return base.with_verdict("cause", first, confidence, others, ranks, missing)

    def _first(self, failures: list[Failure]) -> Failure:
        """The one that explains the others: its kind, who accuses it, when, what it tells.

        Of the rank with the most telling failure, the first one that ended it.
        """

        def explains(failure: Failure) -> tuple[int, int]:
            accused = self._accused[failure.rank] if failure.rank is not None else 0
            return (failure.severity // 3, min(accused, 1))

        def telling(failure: Failure) -> tuple[int, int, int, int]:
            return (-failure.severity, self._alike[failure.fingerprint], *_by_place(failure))

        most = max(map(explains, failures))
        leading = [failure for failure in failures if explains(failure) == most]
        first = min(self._timing.earliest(leading), key=telling)
        of_rank = [
            failure
            for failure in leading
            if failure.rank == first.rank
            and (failure.file, failure.clock) == (first.file, first.clock)
            and failure.domain != "scheduler"
        ]
        return min(of_rank, key=_by_place) if of_rank and first.domain != "scheduler" else first

    def _of_rank(self, base: LogReport, rank: int, reason: str) -> LogReport:
        """A rank that the others point to, although it has not said what happened to it."""
        own = [failure for failure in self._weak + self._cascades if failure.rank == rank]
        every = self._lasting(self._weak) or self._weak or self._cascades
        failure = min(
            own or every, key=lambda candidate: (-candidate.severity, _by_place(candidate))
        )
        reported = failure if failure.rank == rank else failure.of_rank(rank)
        others = _distinct(self._weak)[:3]
        return base.with_verdict(
            "cause", reported, 0.6, others, (rank,), (f"rank {rank}: {reason}",)
        )

    def _of_weak(self, base: LogReport, weak: list[Failure]) -> LogReport:
        killed = [failure for failure in weak if failure.rule == "launcher_saw_kill"]
        weak = [failure for failure in weak if failure.failure_class not in _WAITED] or weak
        classes = {failure.failure_class for failure in weak}
        first = min(killed or weak, key=lambda failure: (-failure.severity, _by_place(failure)))
        if first.failure_class in _WAITED:
            missing = (
                "a rank that failed by itself: all only waited for others, or lost them"
                " (everstep fr analyze names whom)",
            )
            return base.with_verdict("inconclusive", first, 0.3, _distinct(weak), (), missing)
        confidence = 0.7 if len(classes) == 1 else 0.5
        same = {failure.rank for failure in weak if failure.fingerprint == first.fingerprint} - {
            None
        }
        ranks = (first.rank,) if first.rank is not None and len(same) == 1 else ()
        others = _distinct(
            [failure for failure in weak if failure.failure_class != first.failure_class]
        )
        return base.with_verdict("cause", first, confidence, others, ranks, ())

    def _without_cause(self, base: LogReport) -> LogReport:
        ends = [*self._lasting(self._weak), *self._lasting(self._cascades)]
        if not ends:
            return base
        rest = _distinct([*self._weak, *self._cascades, *self._roots])
        missing = ["the log of the rank that ended first: here ranks only lost others"]
        if self._silent:
            missing.append(f"lines of {len(self._silent)} ranks")
        first = min(ends, key=_by_place)
        return base.with_verdict("inconclusive", first, 0.2, rest, (), tuple(missing))


def _by_place(failure: Failure) -> tuple[int, int]:
    return (failure.file, failure.line)


def _are_ordered(failures: list[Failure]) -> bool:
    """Whether one log, or one clock, says which was first: lines far apart, not all at once."""
    if len({failure.file for failure in failures}) > 1:
        return False
    lines = sorted(failure.line for failure in failures)
    return len(failures) < _FOLLOWING_ALIKE and lines[0] < lines[1]


def _furthest_behind(enqueued: dict[int, int]) -> int | None:
    """The only rank that entered fewer collectives than all others."""
    if len(enqueued) < 2:
        return None
    least = min(enqueued.values())
    behind = [rank for rank, sequence in enqueued.items() if sequence == least]
    return behind[0] if len(behind) == 1 and len(set(enqueued.values())) > 1 else None


def _only_top(counts: Counter[int]) -> int | None:
    top = counts.most_common(2)
    return top[0][0] if len(top) == 1 or top[0][1] > top[1][1] else None


def _distinct(failures: Iterable[Failure]) -> list[Failure]:
    """One for each name, the most telling first."""
    names: dict[str, Failure] = {}
    for failure in sorted(failures, key=lambda other: (-other.severity, _by_place(other))):
        names.setdefault(failure.fingerprint, failure)
    return list(names.values())


def _ranks_alike(failures: Iterable[Failure]) -> Mapping[str, int]:
    """How many ranks have each failure; few are alike until there are many.

    What one rank alone has is more telling than what many have in common.
    """
    counts = Counter(failure.fingerprint for failure in failures)
    return Counter({name: number for name, number in counts.items() if number >= _MANY_ALIKE})
