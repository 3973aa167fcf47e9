"""Traces that others wrote, where their folder is there: see benchmarks/scoreboard.py."""

import os
from pathlib import Path

import pytest

from benchmarks.foreign import traces

_WHERE = os.environ.get("EVERSTEP_FOREIGN", "")
pytestmark = pytest.mark.skipif(
    not _WHERE, reason="EVERSTEP_FOREIGN names no folder with data of others"
)


def test_the_slow_down_is_theirs_and_nobody_innocent_is_slow() -> None:
    scored = traces.score(Path(_WHERE))
    assert scored is not None
    assert [answer.detail for answer in scored.answers if answer.outcome != "right"] == []
    assert all(
        "sequence lengths" in answer.detail for answer in scored.answers if answer.case == "SE"
    )
