"""Decides which failure was the first: by causes, then by clocks."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from everstep_services.attribution.log_analysis.clocks import ZONE_S, Earliest, Moment, Offset
from everstep_services.attribution.log_analysis.log_end import Tails
from everstep_services.attribution.log_analysis.pending_work import WorkMismatch
from everstep_services.attribution.log_analysis.report import Failure, LogReport
from everstep_services.attribution.log_analysis.rules import ENDS

_FOLLOWING_ALIKE = 4
_MANY_ALIKE = 3
_SURELY_FIRST_S = 1.0
_OTHER_YEAR_S = 300 * 86400.0
"""So far apart are times only where one of them has no year."""
_SURE = 0.95
_CAUGHT = 0.5
"""The confidence in an exception after which its rank made another step."""
_WENT_ON = "the end of the rank: it made a step after this exception"
_NO_KERNEL_LOG = "the kernel's log: this line is of the kernel, but a rank wrote it"
_NO_END = "a line about the end: the log stops without one"
_NO_CALL = "the call that NCCL made: NCCL_DEBUG=INFO logs it"
_NO_PEER = "the log of the other end: a rank that was gone looks the same from here"
_NO_PATH = "a message over InfiniBand was sent again until it was given up: nothing answered"
_RETRIED = re.compile(
    r"\b(?:error|status)[ =](?:12|13|IBV_WC_RETRY_EXC_ERR|IBV_WC_RNR_RETRY_EXC_ERR)\b"
)
"""Nobody acknowledged (12), or nobody was ready (13)."""
_OF_NCCL = 0.6
"""The confidence in a failed call of NCCL where no rank fails otherwise."""
_LOST = "peer_lost"
_COMPARE = "Compare what these ranks do before this collective: a branch, a batch more, a shape."
_FROM_OUTSIDE = frozenset({"time_limit", "cancelled", "preempted", "host_oom", "killed"})
"""Classes of ends that a training that stands still waits for."""
_STOOD = 0.6
_WHY = "why they stood still: stacks of the ranks, or their flight recorders, tell it"
_OF_HANG = "Look at what the silent ranks did; more time does not help."
_FEW = 2
_WAITED = frozenset({"collective_timeout", "rendezvous", "nccl_error"})
"""Classes of what ranks write that wait for, or lose, another."""


class Timing:
    """The order of failures by clocks and lines: a hint that never outweighs causes."""

    def __init__(
        self,
        offsets: Mapping[str, Offset],
        latest_step: float | None,
        survived: Mapping[int, int],
        continued: Collection[tuple[int, int]] = (),
    ) -> None:
        self._offsets = offsets
        self._latest_step = latest_step
        self._survived = survived
        self._continued = continued

    def is_continued(self, failure: Failure) -> bool:
        """Whether its own rank made a step after the traceback: somebody caught the exception."""
        return bool(failure.frames) and (failure.file, failure.line) in self._continued

    def is_outlived(self, failure: Failure) -> bool:
        """Whether training went on after a failure: by lines of its file, or by days."""
        if failure.line <= self._survived.get(failure.file, 0):
            return True
        if failure.at is None or self._latest_step is None or self._survived.get(failure.file):
            return False
        return ZONE_S < self._latest_step - failure.at < _OTHER_YEAR_S

    def earliest(self, failures: Sequence[Failure]) -> list[Failure]:
        """The failures, without those that were certainly later than another."""
        moments = {
            number: Moment(failure.clock, failure.at)
            for number, failure in enumerate(failures)
            if failure.at is not None
        }
        earliest = Earliest(moments.values(), self._offsets)
        return [
            failure
            for number, failure in enumerate(failures)
            if number not in moments or not earliest.is_before(moments[number], _SURELY_FIRST_S)
        ]


def _told_by_another(failure: Failure, rank: int) -> Failure:
    """The failure of a rank by a line of another: the line's own rank is named before it."""
    witness = "a log" if failure.rank is None else f"rank {failure.rank}"
    return replace(failure.of_rank(rank), means=f"{witness} reports: {failure.means}")


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
        self._hints = [failure for failure in failures if failure.role == "hint"]
        self._alike = _ranks_alike(self._roots)

    def report(
        self, base: LogReport, enqueued: dict[int, int], different: WorkMismatch | None = None
    ) -> LogReport:
        """Return the report with the verdict."""
        roots = self._lasting(self._roots)
        continued = [root for root in roots if self._timing.is_continued(root)]
        if ending := [root for root in roots if not self._timing.is_continued(root)]:
            report = self._of_roots(base, ending, _SURE)
            return report.with_alternatives(_distinct(continued))
        waited = [failure for failure in self._weak if failure.failure_class in _WAITED]
        if different is not None and waited:
            return _of_mismatch(base, min(waited, key=_by_place), different, _distinct(waited))
        if (judged := self._by_others(base, enqueued)) is not None:
            return judged
        if continued:
            return self._of_roots(base, continued, _CAUGHT, (_WENT_ON,))
        lasting = self._lasting(self._weak)
        if weak := [failure for failure in lasting if failure.failure_class not in ENDS] or [
            failure for failure in lasting if failure.failure_class == "aborted"
        ]:
            return self._of_weak(base, weak)
        return self._without_cause(base)

    def _by_others(self, base: LogReport, enqueued: dict[int, int]) -> LogReport | None:
        """The rank that others accuse, or the only silent one; None if there is none."""
        if not self._weak + self._cascades:
            return None
        if (behind := _furthest_behind(enqueued)) is not None:
            return self._of_rank(base, behind, "entered fewer collectives than the others")
        if self._accused and (named := _only_top(self._accused)) is not None:
            return self._of_rank(base, named, f"{self._accused[named]} lines accuse it")
        return None

    def _lasting(self, failures: Iterable[Failure]) -> list[Failure]:
        """The failures, without those that training outlived."""
        return [failure for failure in failures if not self._timing.is_outlived(failure)]

    def _of_roots(
        self,
        base: LogReport,
        roots: list[Failure],
        confidence: float,
        missing: tuple[str, ...] = (),
    ) -> LogReport:
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
        if not rank_known and len(ranks) > 1:
            missing += ("which of the ranks was first: their clocks cannot be compared",)
        return base.with_verdict("cause", first, confidence, others, ranks, missing)

    def _first(self, failures: list[Failure]) -> Failure:
        """The failure that explains the others: by its kind, accusations, time and detail.

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
        """The verdict on a rank that others accuse, although its own lines do not explain it."""
        own = [failure for failure in self._weak + self._cascades if failure.rank == rank]
        every = self._lasting(self._weak) or self._weak or self._cascades
        failure = min(
            own or every, key=lambda candidate: (-candidate.severity, _by_place(candidate))
        )
        reported = failure if failure.rank == rank else _told_by_another(failure, rank)
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
            # NCCL reports a call of its own that failed in other words than the loss of a peer.
            of_nccl = [failure for failure in weak if failure.failure_class == "nccl_error"]
            if of_nccl and not any(lost.failure_class == _LOST for lost in self._cascades):
                others = _distinct([failure for failure in weak if failure not in of_nccl])
                first = min(of_nccl, key=_by_place)
                return base.with_verdict("cause", first, _OF_NCCL, others, (), (_NO_CALL,))
            missing = (
                "a rank that failed by itself: all only waited for others, or lost them"
                " (everstep fr analyze names the rank)",
                *self._without_lines(),
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

    def _without_lines(self) -> list[str]:
        """What is missing of ranks that wrote nothing: silence accuses none of them."""
        if not self._silent:
            return []
        if len(self._silent) > _FEW:
            return [f"lines of {len(self._silent)} ranks"]
        return [f"lines of rank {rank}, which wrote nothing" for rank in self._silent]

    def _without_cause(self, base: LogReport) -> LogReport:
        ends = [*self._lasting(self._weak), *self._lasting(self._cascades)]
        if not ends and (hints := self._lasting(self._hints)):
            return base.with_verdict(
                "inconclusive", hints[0], 0.2, _distinct(hints[1:]), (), (_missing_of(hints[0]),)
            )
        if not ends:
            return base
        rest = _distinct([*self._weak, *self._cascades, *self._roots])
        first = min(ends, key=_by_place)
        if {failure.rule for failure in ends} == {"ib_completion"} and _RETRIED.search(first.quote):
            path = replace(first, failure_class="network", domain="network", means=_NO_PATH)
            return base.with_verdict("cause", path, 0.5, (), (), (_NO_PEER,))
        missing = ["the log of the rank that ended first: here ranks only lost others"]
        missing += self._without_lines()
        return base.with_verdict("inconclusive", first, 0.2, rest, (), tuple(missing))


def _of_mismatch(
    base: LogReport, failure: Failure, different: WorkMismatch, others: list[Failure]
) -> LogReport:
    """The verdict on ranks that wait in different collectives."""
    verdict = replace(
        failure,
        failure_class="collective_mismatch",
        domain="user_code",
        rule="collective_mismatch",
        means=different.words,
        advice=_COMPARE,
        fingerprint="collective_mismatch:collective_mismatch",
        rank=different.ranks[0] if len(different.ranks) == 1 else None,
    )
    return base.with_verdict("cause", verdict, different.confidence, others, different.ranks, ())


def with_end(report: LogReport, tails: Tails, year: int) -> LogReport:
    """The report, where the end of the logs tells more: a hang, or work that was not done."""
    cause = report.cause
    if cause is None:
        return report.without(tails.unfinished())
    if cause.failure_class not in _FROM_OUTSIDE:
        return report
    end = (cause.file, cause.line)
    stood = tails.hang(end, cause.quote, year, of_all=not (report.cascades or report.alternatives))
    if stood is None or (cause.domain != "scheduler" and stood.silent_s is None):
        return report
    verdict = replace(
        cause,
        failure_class="hang",
        domain="unknown",
        rule="hang",
        role="root",
        means=stood.words,
        advice=_OF_HANG,
        quote=stood.line or cause.quote,
        fingerprint=f"hang:{','.join(map(str, stood.ranks))}",
        rank=None,
    )
    others = [cause, *report.alternatives]
    return report.with_verdict("inconclusive", verdict, _STOOD, others, stood.ranks, (_WHY,))


def _missing_of(hint: Failure) -> str:
    return _NO_END if hint.rule == "memory_nearly_full" else _NO_KERNEL_LOG


def _by_place(failure: Failure) -> tuple[int, int]:
    return (failure.file, failure.line)


def _are_ordered(failures: list[Failure]) -> bool:
    """Whether one log shows which failure was first: its lines are apart, not all at once."""
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
    """One failure for each name, the most severe first."""
    names: dict[str, Failure] = {}
    for failure in sorted(failures, key=lambda other: (-other.severity, _by_place(other))):
        names.setdefault(failure.fingerprint, failure)
    return list(names.values())


def _ranks_alike(failures: Iterable[Failure]) -> Mapping[str, int]:
    """How many ranks have each failure; few are alike until there are many.

    A failure of one rank alone is more telling than one that many have in common.
    """
    counts = Counter(failure.fingerprint for failure in failures)
    return Counter({name: number for name, number in counts.items() if number >= _MANY_ALIKE})
