"""Where the pictures of jobs show what."""

from datetime import UTC, datetime, timedelta
from typing import Any

from everstep_services.history.dashboard.drawings import shares, timeline

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def finding(found: str | None, cleared: str | None) -> dict[str, Any]:
    return {"job": "j", "rank": 2, "node": "n", "found_at": found, "cleared_at": cleared}


def test_slow_ranks_are_marked_while_they_are_slow() -> None:
    part = {"since": at(0), "until": at(100), "time_class": "productive", "round": 1}
    slow = [finding(at(20), at(50)), finding(at(90), None), finding(None, None)]
    drawn = timeline([part], [], [], slow)
    assert drawn is not None
    assert [(mark.kind, mark.x, mark.width) for mark in drawn.marks] == [
        ("slow", 200, 300), ("slow", 900, 100),
    ]  # fmt: skip
    assert drawn.marks[0].text == "slow: rank 2 on n"


def test_the_wait_for_nodes_has_the_name_that_goodput_gives_it() -> None:
    """Also before the first round, when nothing restarts."""
    assert [name for _, name, *_ in shares({"rendezvous": 60.0})] == ["Rendezvous"]
