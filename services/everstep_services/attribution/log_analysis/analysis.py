"""What is kept of each rank's lines, and which failure began it: by causes first, then by clocks.

What is kept does not grow with the logs: of each rank the first failures of different names, and
numbers of the rest.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

from everstep_services.attribution.log_analysis import fingerprint
from everstep_services.attribution.log_analysis.origins import Origin, of_line
from everstep_services.attribution.log_analysis.report import Failure, Report
from everstep_services.attribution.log_analysis.rules import Match, Role, Rule, Rules
from everstep_services.attribution.log_analysis.tracebacks import Raised, Traceback, innermost

_MOST_ORIGINS = 20_000
_MOST_FAILURES = 8
_MOST_PROCESSES = 20_000
_QUOTED = 400
_FOLLOWING_ALIKE = 4
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")
_SUMMARY = re.compile(r"^\s*(?:exitcode|traceback)\s*:.*(?:\(pid: |by PID )(?P<pid>\d+)")
_SUMMARY_RANK = re.compile(r"^\s*rank\s*:\s*(?P<rank>\d+) \(local_rank: \d+\)")
_BARE = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): (?P<text>.*)")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")
_GENERAL = Rule(
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

    def __init__(self, rules: Rules, world: int | None = None) -> None:
        self._rules = rules
        self._world = world
        self._origins: dict[tuple[int | None, int, str], _Kept] = {}
        self._open: dict[Origin, Traceback] = {}
        self._survived: dict[int, int] = {}
        self._processes: dict[str, int] = {}
        self._summaries: dict[Origin, int] = {}
        self._accused: Counter[int] = Counter()
        self._ranks: set[int] = set()
        self._enqueued: dict[int, int] = {}
        self.names: list[str] = []
        self.notes: list[str] = []
        self.lines = 0
        self.bytes = 0

    def survived(self, file: int, line: int) -> None:
        """Progress was written after this line of the file: what stood before it ended nothing."""
        self._survived[file] = line

    def add(self, file: Origin, number: int, line: str) -> bool:
        """Take a line; whether it means anything."""
        origin, text = of_line(line, file)
        if origin.rank is not None and len(self._ranks) < _MOST_ORIGINS:
            self._ranks.add(origin.rank)
        if traceback := self._open.get(origin):
            raised = None if Traceback.begins(text) else traceback.add(text)
            if raised is not None:
                del self._open[origin]
                self._add_raised(origin, number, line, raised)
                return True
            if traceback.is_lost:
                del self._open[origin]
        if Traceback.begins(text):
            if len(self._open) < _MOST_ORIGINS:
                self._open[origin] = Traceback()
            return True
        return self._add_open_line(origin, number, line, text)

    @property
    def has_open_traceback(self) -> bool:
        """Whether lines without any word are needed."""
        return bool(self._open)

    def end_file(self) -> None:
        """Forget tracebacks that have not ended."""
        self._open.clear()

    def _add_open_line(self, origin: Origin, number: int, line: str, text: str) -> bool:
        if enqueued := _ENQUEUED.search(text):
            self._set_enqueued(origin.rank, int(enqueued[1]))
        if summary := _SUMMARY_RANK.match(text):
            self._summaries = {origin: int(summary["rank"][:7])}
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

    def _add_raised(self, origin: Origin, number: int, line: str, raised: Raised) -> None:
        kind = raised.kind.rpartition(".")[2]
        text = f"{kind}: {raised.message}" if raised.message else kind
        match = self._rules.match(text) or Match(_GENERAL, {})
        name = fingerprint.of_exception(kind, innermost(raised.frames), raised.message)
        frames = tuple(f"{one.file}:{one.line} in {one.function}" for one in raised.frames)
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
        if "peer" in groups:
            self._accused[int(groups["peer"][:7])] += 1
        pid = groups.get("pid", "")
        if summary := _SUMMARY.match(line):
            pid = summary["pid"]
            rank = self._summaries.get(origin, rank)
            if rank is not None and len(self._processes) < _MOST_PROCESSES:
                self._processes[pid] = rank
        at = _TIME.search(line)
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
            at=_seconds(at[1]) if at else None,
            quote=line.strip()[:_QUOTED],
            frames=frames,
            pid=pid,
        )
        key = (rank, -1 if rank is not None else origin.file, origin.member if rank is None else "")
        if key not in self._origins and len(self._origins) >= _MOST_ORIGINS:
            key = (None, origin.file, "")
        self._origins.setdefault(key, _Kept()).add(failure)

    # --- the verdict ---

    def report(self) -> Report:
        """What failed first, with what speaks for it."""
        failures = [one for kept in self._origins.values() for one in kept.failures.values()]
        cascades: Counter[str] = Counter()
        for kept in self._origins.values():
            cascades.update(kept.cascades)
        base = Report(
            verdict="nothing",
            files=tuple(self.names),
            lines=self.lines,
            ranks=len(self._ranks),
            cascades=dict(cascades.most_common()),
            notes=tuple(self.notes),
        )
        failures = [self._with_rank(one) for one in failures]
        return Judgement(failures, self._accused, self._survived, self._silent()).report(
            base, self._enqueued
        )

    def _with_rank(self, failure: Failure) -> Failure:
        """The failure with the rank whose process the launcher gave that number."""
        rank = self._processes.get(failure.pid)
        return failure if rank is None or failure.rank is not None else failure.of_rank(rank)

    def _silent(self) -> tuple[int, ...]:
        """Ranks of which no line tells anything, among those up to the highest known one."""
        failed = {rank for rank, _, _ in self._origins if rank is not None}
        world = self._world or max([*self._ranks, *self._accused, 0]) + 1
        if len(failed) < max(2, world - 2):
            return ()
        return tuple(rank for rank in range(world) if rank not in failed)


class Judgement:
    """Weighs failures against each other."""

    def __init__(
        self,
        failures: Sequence[Failure],
        accused: Counter[int],
        survived: dict[int, int],
        silent: tuple[int, ...],
    ) -> None:
        self._accused = accused
        self._survived = survived
        self._silent = silent
        self._failures = failures
        self._roots = [one for one in failures if one.role == "root"]
        self._weak = [one for one in failures if one.role == "weak"]
        self._cascades = [one for one in failures if one.role == "cascade"]

    def report(self, base: Report, enqueued: dict[int, int]) -> Report:
        """The verdict."""
        if roots := self._lasting(self._roots):
            return self._of_roots(base, roots, 0.95)
        if (judged := self._by_others(base, enqueued)) is not None:
            return judged
        if weak := [one for one in self._lasting(self._weak) if one.rule != "launcher_saw_exit"]:
            return self._of_weak(base, weak)
        if self._roots:
            return self._of_roots(base, self._roots, 0.4)
        return self._without_cause(base)

    def _by_others(self, base: Report, enqueued: dict[int, int]) -> Report | None:
        """The rank that the others point to, or that alone is silent; None where there is none."""
        if not self._weak + self._cascades:
            return None
        if behind := _furthest_behind(enqueued):
            return self._of_rank(base, behind, "entered fewer collectives than the others")
        if self._accused and (named := _only_top(self._accused)) is not None:
            return self._of_rank(base, named, f"{self._accused[named]} lines accuse it")
        if 1 <= len(self._silent) <= 2 and self._weak + self._cascades:
            return self._of_rank(
                base, self._silent[0], "the others lost it; it wrote nothing about an end"
            )
        return None

    def _lasting(self, failures: Iterable[Failure]) -> list[Failure]:
        """Without those that training outlived."""
        return [one for one in failures if one.line > self._survived.get(one.file, 0)]

    def _of_roots(self, base: Report, roots: list[Failure], confidence: float) -> Report:
        first = self._first(roots)
        alike = [one for one in roots if one.fingerprint == first.fingerprint]
        others = _distinct([one for one in roots if one.fingerprint != first.fingerprint])
        rank_known = len(alike) == 1 or _are_ordered(alike)
        if others and others[0].failure_class != first.failure_class:
            confidence -= 0.15 if first.severity > others[0].severity else 0.25
        ranks = tuple(sorted({one.rank for one in alike if one.rank is not None}))
        missing: tuple[str, ...] = ()
        if not rank_known and len(ranks) > 1:
            missing = ("which of the ranks was first: their clocks cannot be compared",)
        return base.with_verdict("cause", first, confidence, others, ranks, missing)

    def _first(self, failures: list[Failure]) -> Failure:
        """The one that explains the others: its kind, who accuses it, its place, then its time."""

        def weight(one: Failure) -> tuple[int, int, int]:
            accused = self._accused[one.rank] if one.rank is not None else 0
            return (one.severity // 3, min(accused, 1), one.severity)

        best = max(map(weight, failures))
        leading = [one for one in failures if weight(one) == best]
        first_files = {one.file for one in leading}
        earlier = [
            one
            for one in failures
            if one.file in first_files and weight(one)[0] == best[0] and one not in leading
        ]
        candidate = min(leading, key=_by_place)
        same_file = [
            one for one in earlier if one.file == candidate.file and one.line < candidate.line
        ]
        return min(same_file, key=_by_place) if same_file else candidate

    def _of_rank(self, base: Report, rank: int, reason: str) -> Report:
        """A rank that the others point to, although it has not said what happened to it."""
        own = [one for one in self._weak + self._cascades if one.rank == rank]
        every = self._lasting(self._weak) or self._weak or self._cascades
        failure = min(own or every, key=lambda one: (-one.severity, _by_place(one)))
        reported = failure if failure.rank == rank else failure.of_rank(rank)
        others = _distinct(self._weak)[:3]
        return base.with_verdict(
            "cause", reported, 0.6, others, (rank,), (f"rank {rank}: {reason}",)
        )

    def _of_weak(self, base: Report, weak: list[Failure]) -> Report:
        killed = [one for one in weak if one.rule == "launcher_saw_kill"]
        classes = {one.failure_class for one in weak}
        first = min(killed or weak, key=lambda one: (-one.severity, _by_place(one)))
        if first.failure_class == "collective_timeout":
            missing = (
                "a rank that failed by itself: all only waited (everstep fr analyze names whom)",
            )
            return base.with_verdict("inconclusive", first, 0.3, _distinct(weak), (), missing)
        confidence = 0.7 if len(classes) == 1 else 0.5
        ranks = (first.rank,) if first.rank is not None else ()
        others = _distinct([one for one in weak if one.failure_class != first.failure_class])
        return base.with_verdict("cause", first, confidence, others, ranks, ())

    def _without_cause(self, base: Report) -> Report:
        rest = _distinct([*self._weak, *self._cascades])
        if not rest:
            return base
        missing = ["the log of the rank that ended first: here ranks only lost others"]
        if self._silent:
            missing.append(f"lines of {len(self._silent)} ranks")
        first = min(rest, key=_by_place)
        return base.with_verdict("inconclusive", first, 0.2, rest, (), tuple(missing))


def _by_place(one: Failure) -> tuple[int, int]:
    return (one.file, one.line)


def _are_ordered(failures: list[Failure]) -> bool:
    """Whether one log, or one clock, says which was first: lines far apart, not all at once."""
    if len({one.file for one in failures}) > 1:
        return False
    lines = sorted(one.line for one in failures)
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
    for one in sorted(failures, key=lambda one: (-one.severity, _by_place(one))):
        names.setdefault(one.fingerprint, one)
    return list(names.values())


def _seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text.replace(",", ".")).timestamp()
    except ValueError:
        return None
