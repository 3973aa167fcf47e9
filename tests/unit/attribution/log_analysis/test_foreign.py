"""Logs that others wrote, where their folder is there: see benchmarks/scoreboard.py."""

import os
from pathlib import Path

import pytest

from benchmarks.foreign import DataSet, gpualert, threads

_WHERE = os.environ.get("EVERSTEP_FOREIGN", "")
pytestmark = pytest.mark.skipif(
    not _WHERE, reason="EVERSTEP_FOREIGN names no folder with data of others"
)


def mistakes(scored: DataSet, *outcomes: str) -> list[str]:
    return [
        f"{answer.case}: {answer.detail}" for answer in scored.answers if answer.outcome in outcomes
    ]


def test_classes_of_failed_trainings() -> None:
    scored = gpualert.score(Path(_WHERE))
    assert scored is not None
    assert scored.macro_f1() >= 0.97, mistakes(scored, "wrong", "silent")
    assert (scored.calibration_error() or 0.0) <= 0.05


def test_causes_that_threads_have_settled() -> None:
    """Silence is allowed where the excerpt does not tell the cause; a wrong cause is not."""
    scored = threads.score(Path(_WHERE))
    assert scored is not None
    assert not mistakes(scored, "wrong", "wrong rank")
    assert (scored.calibration_error() or 0.0) <= 0.05
    assert scored.count("right") >= 0.9 * len(scored.answers), mistakes(scored, "silent")
