"""A message and a target that fails, hangs, refuses or comes back: repeats, and their counts."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from everstep.bus.client import NatsBus
from everstep.observe.metrics import MetricRegistry
from everstep_services.history.notifications.metrics import TargetMetrics
from everstep_services.history.notifications.settings import SlackSettings
from tests.fakes.clock import LeapingClock
from tests.integration.history.notifications.replicas import (
    SLACK_SECRET,
    AttemptsByHand,
    at_work,
    notices_on_bus,
    quick,
    record,
    secret,
    taken,
    target_counts,
    webhook_only,
)
from tests.integration.history.notifications.targets import TargetServer
from tests.unit.history.notice_facts import job_ended, opened
from tests.waiting import until_async


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> AttemptsByHand:
    return AttemptsByHand(monkeypatch)


async def test_a_message_is_repeated_with_the_same_key_until_it_is_taken(
    bus: NatsBus, server: TargetServer, attempts: AttemptsByHand
) -> None:
    server.plan = [(500, {}), "drop", (429, {"Retry-After": "1"}), "hang", (408, {})]
    server.when_it_hangs = attempts.run_out
    async with at_work(webhook_only(server, within_s=attempts.WITHIN_S), bus) as replica:
        await record(bus, opened("i1"))
        await taken(server, 1)
        await until_async(lambda: target_counts(replica)["waiting"] == 0, "nothing to wait")
        counts = target_counts(replica)
    assert [one.key for one in server.heard] == ["j/i1/firing"] * 6
    assert len({one.body for one in server.heard}) == 1
    assert (counts["sent"], counts["retries"]) == (1, 5)


async def test_a_target_has_the_message_once_its_status_says_so(
    bus: NatsBus, server: TargetServer, attempts: AttemptsByHand
) -> None:
    """The text of its answer may be late, or never come: the message is not sent again."""
    server.plan = ["late text"]
    async with at_work(webhook_only(server, within_s=attempts.WITHIN_S), bus) as replica:
        await record(bus, opened("i1"))
        await until_async(attempts.has_status, "the status of the answer")
        attempts.run_out()
        await until_async(lambda: target_counts(replica)["waiting"] == 0, "nothing to wait")
        counts = target_counts(replica)
    assert (counts["sent"], counts["retries"]) == (1, 0)
    assert [one.key for one in server.heard] == ["j/i1/firing"]


async def test_metrics_show_for_how_long_a_target_fails(bus: NatsBus, server: TargetServer) -> None:
    """A11.5: also after its messages were given up, until it takes one again."""
    metrics = MetricRegistry("history")
    server.plan = [(503, {}), (403, {})]
    async with at_work(webhook_only(server), bus) as replica:
        metrics.collect([TargetMetrics(replica)])
        assert target_counts(replica)["failing_seconds"] == 0
        await record(bus, opened("i1"))
        await until_async(lambda: target_counts(replica)["failed"] == 1, "a refusal")
        await until_async(lambda: target_counts(replica)["failing_seconds"] > 0, "the time")
        assert (
            'everstep_notify_failed_total{target="webhook"} 1.0'
            in (await metrics.exposition()).decode()
        )
        await record(bus, opened("i2", job="k"))
        await taken(server, 1)
        await until_async(lambda: target_counts(replica)["failing_seconds"] == 0, "a success")
        await until_async(lambda: target_counts(replica)["waiting"] == 0, "nothing to wait")
        page = (await metrics.exposition()).decode()
        assert 'everstep_notify_sent_total{target="webhook"} 1.0' in page
    assert target_counts(replica)["failing_seconds"] == 0


async def test_a_target_that_hangs_is_tried_with_one_message_and_then_gets_all(
    bus: NatsBus, server: TargetServer, attempts: AttemptsByHand
) -> None:
    """Each attempt is at the message that was not tried for the longest time."""
    server.plan = ["hang"] * 4
    server.when_it_hangs = attempts.run_out
    clock = LeapingClock()
    settings = webhook_only(server, within_s=attempts.WITHIN_S, settle_s=60.0)
    async with at_work(settings, bus, clock) as replica:
        await record(bus, *(opened(f"i{number}", job=f"j{number}") for number in range(4)))
        await until_async(
            lambda: notices_on_bus(bus), "all are read", holds=lambda notices: len(notices) == 4
        )
        clock.leap(settings.settle_s)
        await taken(server, 4)
        await until_async(lambda: target_counts(replica)["waiting"] == 0, "it gets all")
        counts = target_counts(replica)
    tried = [heard.key for heard in server.heard]
    assert len(set(tried[:4])) == 4
    assert tried[4:] == tried[:4]
    assert (counts["sent"], counts["retries"]) == (4, 4)


async def test_a_target_that_is_away_for_a_while_gets_all(
    bus: NatsBus, server: TargetServer
) -> None:
    gone = TargetServer()
    async with gone.up():
        pass
    async with at_work(webhook_only(gone), bus) as replica:
        await record(bus, opened("i1"), opened("i2", job="k"))
        await until_async(lambda: target_counts(replica)["retries"] >= 3, "some attempts")
        async with gone.up():
            await taken(gone, 2)
            assert sorted(one.key for one in gone.taken) == ["j/i1/firing", "k/i2/firing"]
    assert server.heard == []


@pytest.mark.parametrize("status", [400, 401, 404, 302])
async def test_what_a_target_refuses_is_given_up_once(
    bus: NatsBus, server: TargetServer, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    other = TargetServer()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(other.up())
        server.plan = [(status, {"Location": f"{other.url}/elsewhere"})]
        replica = await stack.enter_async_context(at_work(webhook_only(server), bus))
        await record(bus, opened("i1"))
        await until_async(lambda: target_counts(replica)["failed"] == 1, "a refusal")
        await record(bus, opened("i2", job="k"))
        await taken(server, 1)
        assert [one.key for one in server.heard] == ["j/i1/firing", "k/i2/firing"]
        assert other.heard == []
    assert caplog.text.count("notice_given_up") == 1
    assert f"status {status}" in caplog.text


async def test_a_message_that_fails_does_not_hold_the_others_back(
    bus: NatsBus, server: TargetServer
) -> None:
    async def fail_the_first() -> None:
        is_first = server.heard[-1].key.startswith("j/i1")
        server.plan = [(503, {})] if is_first else []

    server.before_answer = None
    answer = server._answer

    async def answered(heard: Any, reader: Any, writer: Any) -> None:
        await fail_the_first()
        await answer(heard, reader, writer)

    server._answer = answered  # type: ignore[method-assign]
    async with at_work(webhook_only(server), bus):
        await record(bus, opened("i1"), opened("i2", job="k"))
        await taken(server, 1)
        assert server.taken[0].key == "k/i2/firing"


async def test_a_missing_secret_is_one_line_and_waits(
    bus: NatsBus, tmp_path: Path, server: TargetServer, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "slack"
    async with at_work(quick(slack=SlackSettings(url_file=file)), bus) as replica:
        await record(bus, opened("i1"), job_ended("failed", job="k"))
        await until_async(lambda: target_counts(replica, "slack")["retries"] >= 2, "attempts")
        secret(file, f"{server.url}/services/{SLACK_SECRET}")
        await taken(server, 2)
    assert caplog.text.count("notice_waits") == 1
    assert str(file) in caplog.text
