"""Failures of public issue threads: the open half. The sealed half is only scored."""

import pytest

from benchmarks.foreign import public
from everstep.verdict_causes import RETRIES
from everstep_services.attribution.log_analysis.rules import shipped

HARD = {
    "huggingface/transformers#12935"  # the line tells of memory, and the cause was an index
}


@pytest.fixture(scope="module")
def scored() -> dict[str, tuple[str, str]]:
    return {answer.case: (answer.outcome, answer.detail) for answer in public.half("open").answers}


@pytest.mark.parametrize(
    "case", [case for case in public.cases() if not case.is_sealed], ids=lambda case: case.thread
)
def test_the_cause_that_the_thread_has_settled(
    case: public.Case, scored: dict[str, tuple[str, str]]
) -> None:
    outcome, detail = scored[case.thread]
    assert (outcome == "right") != (case.thread in HARD), detail


def test_each_thread_is_there_once_and_has_a_truth() -> None:
    cases = public.cases()
    assert len({case.thread for case in cases}) == len(cases) >= 100
    assert 0.3 < sum(case.is_sealed for case in cases) / len(cases) < 0.7
    assert all(case.truth and case.lines and case.retry in RETRIES for case in cases)
    classes = {rule.failure_class for rule in shipped().rules} | {
        "inconclusive", "python_exception", "size_mismatch",
    }  # fmt: skip
    assert {name for case in cases for name in case.expect} <= classes


def test_the_confidence_is_how_often_answers_are_right() -> None:
    assert (public.half("open").calibration_error() or 0.0) <= 0.05
