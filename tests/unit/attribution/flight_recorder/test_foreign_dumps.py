"""Dumps that others wrote, where their folder is there: see benchmarks/scoreboard.py."""

import os
from pathlib import Path

import pytest

from benchmarks.foreign import recorders

_WHERE = os.environ.get("EVERSTEP_FOREIGN", "")
pytestmark = pytest.mark.skipif(
    not _WHERE, reason="EVERSTEP_FOREIGN names no folder with data of others"
)


def test_culprits_and_no_others_in_three_faults_at_most() -> None:
    scored = recorders.score(Path(_WHERE))
    assert scored is not None
    assert [answer.detail for answer in scored.answers if answer.outcome != "right"] == []
    assert all(int(answer.answer) <= 3 for answer in scored.answers)
