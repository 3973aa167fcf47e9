"""A job's facts second by second, and a trace whose goodput is computed by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

from everstep.messages import Fact, Ledger
from tests.unit.history.facts import make

BEGAN = datetime(2026, 11, 25, 8, 0, tzinfo=UTC)
ZERO_S = BEGAN.timestamp()
SECONDS = {
    "productive": (147 - 12) - 2 - 9 - 4 + (238 - 158) - 7,
    "start_up": (8 - 5) + (12 - 8) + (153 - 151) + (154 - 153) + (158 - 156),
    "rendezvous": 5 + 1,
    "restore": 2,
    "checkpoint_stall": 2,
    "stall": 3 + 7,
    "lost_steps": 9,
    "straggler_tax": 4,
    "idle": 245 - 238,
}
"""What a hand computes of `TRACE`."""


def at(second: float, kind: str, /, **values: Any) -> Fact:
    """A fact of that second of the trace."""
    values = {"round": None, **values}
    return make(kind, job="j", at=BEGAN + timedelta(seconds=second), **values)


def started(second: float = 0, name: str = "a") -> Fact:
    return at(second, "allocation_started", allocation=name)


def round_of(number: int, formed: float, ran: float, first: float, **more: Any) -> list[Fact]:
    """A round until its first step."""
    return [
        at(formed, "round_formed", round=number, allocation="a", incident=None),
        at(ran, "round_started", round=number),
        at(first, "progress_made", round=number, is_first=True, steps=1, steps_s=first - ran,
           lost_steps=0, **more),
    ]  # fmt: skip


def progress(second: float, number: int, steps: int, steps_s: float) -> Fact:
    return at(second, "progress_made", round=number, is_first=False, steps=steps, steps_s=steps_s,
              lost_steps=0)  # fmt: skip


def ended(second: float, number: int, cause: str = "done", incident: str | None = None) -> Fact:
    return at(second, "round_ended", round=number, cause=cause, incident=incident)


def closed(second: float, incident: str, detect_s: float, lost_s: float, next_round: int) -> Fact:
    return at(
        second, "incident_closed", incident=incident, outcome="recovered", lost_s=lost_s,
        ledger=Ledger(detect_s=detect_s), next_round=next_round,
    )  # fmt: skip


TRACE: list[Fact] = [
    started(),
    *round_of(1, formed=5, ran=8, first=12),
    progress(72, 1, 60, 60.0),
    at(90, "checkpoint_committed", round=1, step=70, tier="global", stall_s=2.0, lag_s=10.0),
    at(91, "checkpoint_committed", round=1, step=70, tier="peer", stall_s=1.5, lag_s=11.0),
    at(100, "straggler_found", round=1, rank=3, id="slow", slowdown_ratio=0.25),
    at(120, "straggler_cleared", round=1, rank=3, finding="slow", lost_s=4.0),
    progress(132, 1, 58, 60.0),
    ended(150, 1, "rank_exited", "i"),
    at(151, "round_formed", round=2, allocation="a", incident="i"),
    at(153, "round_started", round=2),
    at(156, "checkpoint_restored", round=2, step=110, took_s=2.0),
    at(158, "progress_made", round=2, is_first=True, steps=1, steps_s=5.0, lost_steps=8),
    closed(158, "i", detect_s=3.0, lost_s=9.0, next_round=2),
    progress(218, 2, 60, 60.0),
    at(230, "rank_recovered", round=2, stalled_s=7.0),
    progress(238, 2, 13, 20.0),
    ended(240, 2),
    at(241, "job_ended", state="done"),
    at(245, "allocation_ended", allocation="a", state="done"),
]
"""A rank dies 150 s after the start; the training is back after 8 s."""
