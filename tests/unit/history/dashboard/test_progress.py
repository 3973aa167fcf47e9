"""Step times, reported values and the time of the end, from progress facts."""

from datetime import UTC, datetime, timedelta
from typing import Any

from everstep_services.history.dashboard.pages.jobs import eta, reported_values, step_times

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def report(
    ago_min: float, step: int, each_s: float, steps: int = 60, **more: Any
) -> dict[str, Any]:
    at = (NOW - timedelta(minutes=ago_min)).isoformat()
    return {"at": at, "step": step, "step_p50_s": each_s, "steps": steps, "steps_s": 60.0, **more}


def job(**more: Any) -> dict[str, Any]:
    return {"state": "running", "last_step": 300, "total_steps": 1000, **more}


def test_the_median_counts_each_report_by_its_steps() -> None:
    times = step_times([report(3, 100, 5.0, 1), report(2, 200, 1.0), report(1, 300, 2.0, 30)])
    assert times is not None
    assert (times.median_s, times.last_s, times.max_s) == (1.0, 2.0, 5.0)
    assert times.p99_s is None
    assert [row.step for row in times.rows] == [300, 200, 100]


def test_p99_and_max_are_of_the_worst_minute() -> None:
    times = step_times(
        [report(2, 1, 1.0, step_p99_s=1.5, step_max_s=9.0), report(1, 2, 1.0, step_p99_s=1.2)]
    )
    assert times is not None
    assert (times.p99_s, times.max_s) == (1.5, 9.0)
    assert times.top_s < 9.0  # one long step does not flatten the picture
    assert times.points_p99


def test_the_time_of_a_first_step_is_not_a_step_time() -> None:
    first = {"at": NOW.isoformat(), "step": 1, "steps": 1, "steps_s": 300.0, "is_first": True}
    assert step_times([first, report(1, 2, 1.0)]) is None


def test_the_end_follows_from_the_pace_of_the_last_hour() -> None:
    slow_before = [report(180 - i, i, 50.0) for i in range(60)]
    times = step_times([*slow_before, *(report(30 - i, 200 + i, 2.0) for i in range(30))])
    known = eta(job(), times, NOW)
    assert known is not None
    assert known.steps_left == 700
    assert known.at == NOW + timedelta(seconds=1400)


def test_no_end_is_shown_where_nobody_can_tell() -> None:
    times = step_times([report(2, 299, 1.0), report(1, 300, 1.0)])
    assert eta(job(), times, NOW) is not None
    for unknown in (
        job(total_steps=None), job(total_steps=300), job(state="restarting"), job(state="done"),
        job(last_step=None),
    ):  # fmt: skip
        assert eta(unknown, times, NOW) is None
    assert eta(job(), times, NOW + timedelta(minutes=20)) is None
    assert eta(job(), None, NOW) is None
    assert eta(job(total_steps=2**53), times, NOW) is None


def told(**values: float) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def test_values_begin_with_the_loss() -> None:
    values = reported_values(
        [
            report(2, 1, 1.0, values=told(loss=3.0, acc=0.1)),
            report(1, 2, 1.0, values=told(loss=2.0, x_loss=1)),
        ]
    )
    assert [value.name for value in values] == ["loss", "x_loss", "acc"]
    assert (values[0].last, values[0].low, values[0].high) == (2.0, 2.0, 3.0)
    assert values[0].points == "0.0,0.0 1000.0,40.0"
