"""Logs that others wrote, where their folder is there: see benchmarks/scoreboard.py."""

import os
import random
from pathlib import Path

import pytest

from benchmarks.foreign import DataSet, gpualert, threads
from tests.fakes.failure_loops import ALL, OF_TURNS, loop
from tests.unit.attribution.log_analysis.logs import both

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


@pytest.mark.parametrize("is_any", [False, True])
def test_what_comes_again_with_other_digits_means_the_same(
    is_any: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that of reading everything."""
    paths = sorted(Path(_WHERE).glob("*/*.log"))[:: 4 if is_any else 8]
    texts = [path.read_text(errors="replace") for path in paths]
    log = tmp_path / "job.log"
    log.write_text(loop(texts, 12, random.Random(3), numbers=ALL if is_any else OF_TURNS))
    fast, slow, _ = both(log, monkeypatch)
    assert fast == slow
