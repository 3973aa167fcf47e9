"""What a process says when it is asked: its numbers, and whether it can work."""

import asyncio
from typing import Any

import pytest

from everstep import __version__
from everstep.observe.metrics import MetricRegistry, measure_loop_lag
from everstep.observe.settings import ObserveSettings
from tests.unit.observed import HandClock, broken, buggy, fine, hanging, health_of
from tests.waiting import turns


async def test_metrics_name_the_build_and_what_components_count() -> None:
    metrics = MetricRegistry("history")
    counted = {"sent_total": 3.0, "waiting": 2, "Bad-Name": 1}
    metrics.watch("bus", lambda: counted)
    text = (await metrics.exposition()).decode()
    assert f'everstep_build_info{{service="history",version="{__version__}"}} 1.0' in text
    assert "everstep_bus_sent_total 3.0" in text
    assert "everstep_bus_waiting 2.0" in text
    assert "Bad" not in text
    assert "process_open_fds" in text
    counted["sent_total"] = 4
    assert "everstep_bus_sent_total 4.0" in (await metrics.exposition()).decode()


async def test_a_blocked_loop_shows_in_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    """A metric and a line have the lag (A14.6)."""
    metrics, clock = MetricRegistry("history"), HandClock(late_s=2.5)
    async with asyncio.TaskGroup() as tasks:
        measuring = tasks.create_task(measure_loop_lag(metrics, clock, every_s=0.5))
        await clock.third_sleep.wait()
        measuring.cancel()
    text = (await metrics.exposition()).decode()
    assert "everstep_loop_lag_seconds 2.5" in text
    assert 'everstep_loop_lag_distribution_seconds_bucket{le="1.0"} 0.0' in text
    assert "loop_blocked lag_s=2.50 limit_s=1.00" in caplog.messages


async def test_each_check_says_what_is_wrong_and_nothing_more() -> None:
    health = health_of(HandClock(), 0.01, a=fine, b=broken, c=buggy, d=hanging)
    report = await health.report()
    assert report.status == "failing"
    assert {name: (check.ok, check.reason) for name, check in report.checks.items()} == {
        "a": (True, ""),
        "b": (False, "no server at nats://u:***@h:1"),
        "c": (False, "the check itself failed; see the log of this process"),
        "d": (False, "no answer within 0.01 s"),
    }


async def test_a_thousand_askers_are_one_question_a_second() -> None:
    clock, asked = HandClock(), list[float]()

    async def counted() -> None:
        asked.append(clock.now())
        await turns()

    health = health_of(clock, bus=counted)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(1000):
            tasks.create_task(health.report())
    assert asked == [100.0]
    clock.time += 0.99
    await health.report()
    assert asked == [100.0]
    clock.time += 0.01
    await health.report()
    assert asked == [100.0, 101.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"port": 70000}, "port must be from 0 to 65535, got 70000"),
        ({"check_within_s": 0.0}, "check_within_s must be above 0, got 0"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ObserveSettings(**settings)
