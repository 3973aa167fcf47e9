"""The answer, as data and as text: the verdict first, then its evidence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from everstep.observe.printable import printable
from everstep.observe.redaction import redact
from everstep.verdict_causes import Retry, VerdictCause, retry_of, retry_text

Verdict = Literal["cause", "inconclusive", "nothing"]
_MOST_ALTERNATIVES = 5
_MOST_RANKS = 8
_CALIBRATION = ((0.9, 0.99), (0.55, 0.95), (0.0, 0.75))
"""From each weight on, how often answers about logs of others were right.

Of those that name a cause in docs/benchmarks/scoreboard.md, 2026-11-30: 311 of 312, 45 of 45 and
1 of 1 in the open halves together, 36 of 37, 8 of 10 and 1 of 1 when a half of the public threads
was unsealed; with a prior of one right and one wrong answer: 348 of 351, 54 of 57 and 3 of 4.
"""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A line, or a traceback, that reports a failure."""

    failure_class: str
    domain: VerdictCause
    rule: str
    role: str
    severity: int
    means: str
    advice: str
    source: str
    fingerprint: str
    rank: int | None
    member: str
    """`default3` or `task 3`, where the line tells no global rank."""
    node: str
    file: int
    """The number of its file in the report's list."""
    line: int
    at: float | None
    """The time of the failure, by its clock."""
    clock: str = ""
    """The name of that clock: of a node or a rank."""
    quote: str
    frames: tuple[str, ...] = ()
    pid: str = ""

    def of_rank(self, rank: int) -> "Failure":
        """The same failure, as another rank's."""
        return msgspec.structs.replace(self, rank=rank)

    def for_people(self) -> "Failure":
        """The failure without secrets and control sequences."""
        return msgspec.structs.replace(
            self,
            quote=_clean(self.quote),
            fingerprint=_clean(self.fingerprint),
            frames=tuple(map(_clean, self.frames)),
        )


class EarlierAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on an attempt before the last one."""

    number: int
    """From 1."""
    verdict: Verdict
    failure_class: str
    fingerprint: str
    culprits: tuple[int, ...]
    file: int
    line: int
    quote: str

    @classmethod
    def of(cls, number: int, report: "LogReport") -> "EarlierAttempt":
        """The short form of a report that names a cause."""
        cause = report.cause
        assert cause is not None
        return cls(
            number=number,
            verdict=report.verdict,
            failure_class=cause.failure_class,
            fingerprint=cause.fingerprint,
            culprits=report.culprits,
            file=cause.file,
            line=cause.line,
            quote=cause.quote,
        )


class LogReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all logs together."""

    verdict: Verdict
    files: tuple[str, ...]
    lines: int
    ranks: int
    """The number of ranks with lines that mean anything."""
    cause: Failure | None = None
    weight: float = 0.0
    """How strong the evidence is, compared with that of other analyzers."""
    confidence: float = 0.0
    """How often answers on such evidence are right; of an inconclusive one its weight."""
    culprits: tuple[int, ...] = ()
    """The ranks that failed in this way; several if the logs do not show which was first."""
    retry: Retry = "unknown"
    """Whether another attempt may succeed."""
    alternatives: tuple[Failure, ...] = ()
    missing: tuple[str, ...] = ()
    cascades: Mapping[str, int] = {}
    notes: tuple[str, ...] = ()
    attempts: int = 1
    """The attempts that the logs show; the verdict is about the last one."""
    same_attempts: int = 1
    """The number of last attempts in a row that ended in this way."""
    earlier: tuple[EarlierAttempt, ...] = ()
    """Earlier attempts that failed, the newest first, as far as they are kept."""

    def after(self, earlier: Sequence[EarlierAttempt]) -> "LogReport":
        """The report with the verdicts on earlier attempts, the newest first."""
        same = 1
        for attempt in earlier:
            is_next = attempt.number == self.attempts - same
            if self.cause is None or not is_next or attempt.fingerprint != self.cause.fingerprint:
                break
            same += 1
        return msgspec.structs.replace(self, earlier=tuple(earlier), same_attempts=same)

    def without(self, unread: Sequence[str]) -> "LogReport":
        """The report where parts of files could not be read: a failure may stand there."""
        if self.verdict == "nothing" and unread:
            return msgspec.structs.replace(self, verdict="inconclusive", missing=tuple(unread))
        return self

    def with_alternatives(self, more: Sequence[Failure]) -> "LogReport":
        """The report with failures that were seen, too, and are less probable."""
        others = (*self.alternatives, *(failure.for_people() for failure in more))
        return msgspec.structs.replace(self, alternatives=others[:_MOST_ALTERNATIVES])

    def with_verdict(
        self,
        verdict: Verdict,
        cause: Failure,
        weight: float,
        alternatives: Sequence[Failure],
        culprits: tuple[int, ...],
        missing: tuple[str, ...],
    ) -> "LogReport":
        """The report with this answer, fit for people to see."""
        if cause.rank is not None and not culprits and verdict == "cause":
            culprits = (cause.rank,)
        return msgspec.structs.replace(
            self,
            verdict=verdict,
            cause=cause.for_people(),
            weight=round(weight, 2),
            confidence=_calibrated(weight) if verdict == "cause" else round(weight, 2),
            culprits=culprits,
            retry=_retry(cause) if verdict == "cause" else "unknown",
            alternatives=tuple(
                alternative.for_people() for alternative in alternatives[:_MOST_ALTERNATIVES]
            ),
            missing=missing,
        )


def _calibrated(weight: float) -> float:
    return next(confidence for least, confidence in _CALIBRATION if weight >= least)


def _retry(cause: Failure) -> Retry:
    return retry_of(cause.domain, cause.failure_class, has_nodes=bool(cause.node))


def lines(report: LogReport) -> Iterator[str]:
    """The report for people."""
    yield _headline(report)
    if report.cause is not None:
        yield from _cause(report, report.cause)
    if report.alternatives:
        yield "Also seen:"
        for alternative in report.alternatives:
            where = _where(report, alternative)
            yield f"  {alternative.failure_class}, {where}: {alternative.quote[:160]}"
    yield from _attempts(report)
    if report.cascades:
        counts = ", ".join(f"{number} {name}" for name, number in report.cascades.items())
        yield f"Consequences, not causes: {counts}."
    yield from (f"Missing: {text}." for text in report.missing)
    yield f"{report.lines} lines of {len(report.files)} files were read."
    yield from (f"Note: {note}." for note in report.notes)


def _headline(report: LogReport) -> str:
    if report.verdict == "inconclusive" and report.cause is None:
        return "inconclusive: no line that could be read reports a failure"
    if report.verdict == "nothing" or report.cause is None:
        return "nothing: no line reports a failure"
    where = _where(report, report.cause)
    domain = report.cause.domain.replace("_", " ")
    if report.verdict == "inconclusive":
        return f"inconclusive: {report.cause.means}, first seen in {where}"
    return (
        f"{report.cause.failure_class} ({domain}): {_who(report)}{report.cause.means},"
        f" {where}; confidence {report.confidence:.2f}"
    )


def _who(report: LogReport) -> str:
    ranks = report.culprits
    if len(ranks) > 1:
        shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
        return f"{len(ranks)} ranks ({shown}{', …' if len(ranks) > _MOST_RANKS else ''}): "
    return f"rank {ranks[0]}: " if ranks else ""


def _cause(report: LogReport, cause: Failure) -> Iterator[str]:
    yield f"  {cause.quote}"
    yield from (f"    at {frame}" for frame in cause.frames)
    yield f"  fingerprint {cause.fingerprint}"
    if report.verdict == "cause":
        yield f"  {cause.advice}"
        yield f"  retry: {retry_text(report.retry)}"


def _attempts(report: LogReport) -> Iterator[str]:
    if report.attempts == 1:
        return
    same = f"; the last {report.same_attempts} ended in the same way"
    same = same if report.same_attempts > 1 else ""
    yield f"The logs show {report.attempts} attempts: this is the last{same}."
    for attempt in report.earlier[max(report.same_attempts - 1, 0) :]:
        where = f"{report.files[attempt.file]}:{attempt.line}"
        yield f"  attempt {attempt.number}: {attempt.failure_class}, {where}: {attempt.quote[:160]}"


def _where(report: LogReport, failure: Failure) -> str:
    parts = [
        f"node {failure.node}" if failure.node else "",
        failure.member if failure.rank is None else "",
    ]
    parts.append(f"{report.files[failure.file]}:{failure.line}")
    return ", ".join(part for part in parts if part)


def _clean(text: str) -> str:
    return printable(redact(text))
