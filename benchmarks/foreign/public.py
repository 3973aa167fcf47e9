"""Failures of public issue threads, in two halves: tests/corpus/public."""

import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.foreign import Answer, DataSet, Outcome
from everstep.verdict_causes import Retry
from everstep_services.attribution.log_analysis.files import analyze_files

_CASES = Path(__file__).parents[2] / "tests" / "corpus" / "public" / "cases.toml"
_OPEN = "inconclusive"


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A failure, and what its thread found."""

    thread: str
    truth: str
    expect: tuple[str, ...]
    """The classes that are right, as far as the lines can tell."""
    retry: Retry
    lines: tuple[str, ...]

    @property
    def is_sealed(self) -> bool:
        """Whether it is only scored, by the number of its thread."""
        return int(self.thread.rpartition("#")[2]) % 2 == 0


class _Cases(msgspec.Struct, frozen=True):
    case: tuple[Case, ...]


def cases() -> Sequence[Case]:
    """All cases."""
    return msgspec.convert(tomllib.loads(_CASES.read_text()), _Cases).case


def score(_: Path) -> Sequence[DataSet]:
    """Analyze the lines of each case, and compare class and retry with the thread's."""
    return [half("public threads, open"), half("public threads, sealed", is_sealed=True)]


def half(name: str, *, is_sealed: bool = False) -> DataSet:
    """The score of one half."""
    chosen = [case for case in cases() if case.is_sealed == is_sealed]
    answered = [_answer(case) for case in chosen]
    pairs = [(case.retry, retry) for case, (_, retry) in zip(chosen, answered, strict=True)]
    right = sum(truth == retry for truth, retry in pairs)
    unknown = sum(truth != retry == "unknown" for truth, retry in pairs)
    ours = f"retry: {right} right, {unknown} unknown, {len(pairs) - right - unknown} wrong"
    return DataSet(name, [answer for answer, _ in answered], ours)


def _answer(case: Case) -> tuple[Answer, Retry]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.log"
        path.write_text("".join(f"{line}\n" for line in case.lines))
        report = analyze_files([path]).report()
    outcome: Outcome
    if report.verdict != "cause" or report.cause is None:
        outcome = "right" if _OPEN in case.expect else "silent"
    else:
        outcome = "right" if report.cause.failure_class in case.expect else "wrong"
    said = report.cause.failure_class if report.cause else ""
    confidence = report.confidence if report.verdict == "cause" else None
    detail = (
        f"{report.verdict} {said}, retry {report.retry}, instead of {case.expect}, {case.retry}"
    )
    return Answer(case.thread, outcome, confidence, detail), report.retry
