"""Excerpts of public issue threads whose cause the thread settled."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.foreign import Answer, DataSet, Outcome
from everstep_services.attribution.log_analysis.files import analyze_files

_RANK = re.compile(r"rank(\d+)")
_OPEN = "inconclusive"


def score(folder: Path) -> DataSet | None:
    """Analyze each excerpt, and compare the class of its verdict with those that are right."""
    truth = folder / "threads" / "truth.json"
    if not truth.exists():
        return None
    cases = msgspec.json.decode(truth.read_bytes())
    return DataSet("threads", [_answer(truth.parent, case) for case in cases])


def _answer(folder: Path, case: Mapping[str, Any]) -> Answer:
    report = analyze_files([folder / f"{case['name']}.log"]).report()
    expected = set(case["expect"])
    ranks = {int(found[1]) for word in expected if (found := _RANK.fullmatch(word))}
    outcome: Outcome
    if report.verdict != "cause" or report.cause is None:
        outcome = "right" if _OPEN in expected else "silent"
    elif report.cause.failure_class in expected or (ranks and ranks == {*report.culprits}):
        outcome = "right"
    else:
        outcome = "wrong"
    said = report.cause.failure_class if report.cause else ""
    confidence = report.confidence if report.verdict == "cause" else None
    detail = f"{report.verdict} {said} {report.culprits} instead of {sorted(expected)}"
    return Answer(case["name"], outcome, confidence, detail)
