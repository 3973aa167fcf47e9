"""Messages to people on a real bus, sent to real HTTP servers that misbehave."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.bus import connect, topology
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.clock import SystemClock
from everstep.messages import Fact, NoticesDocument, RankExited
from everstep.messages.codec import decode_as
from everstep.observe.metrics import MetricRegistry
from everstep.subjects import CLUSTER
from everstep_services.history.notifications.documents import BUCKET, begin
from everstep_services.history.notifications.metrics import TargetMetrics
from everstep_services.history.notifications.service import Notifications
from everstep_services.history.notifications.settings import (
    AlertmanagerSettings,
    DeadManSettings,
    NotifySettings,
    PagerDutySettings,
    SlackSettings,
    WebhookSettings,
)
from tests.integration.history.notifications.targets import TargetServer
from tests.unit.history.notice_facts import closed, extended, job_ended, judged, opened
from tests.unit.history.notification_schemas import check_alerts, check_pagerduty, check_slack
from tests.waiting import until_async

SLACK_SECRET = "T0000/B0000/slackSecretXyz"
ROUTING_KEY = "R0UT1NGKEYR0UT1NGKEYR0UT1NGKEY00"
WEBHOOK_SECRET = "webhook-secret-1234567890"


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with connect(nats.settings(ADMIN), "setup", spool=tmp_path / "setup") as bus:
        await topology.init(bus.jetstream)
    async with connect(nats.settings(SERVICE), "history", spool=tmp_path / "spool") as bus:
        yield bus


@pytest.fixture
async def server() -> AsyncIterator[TargetServer]:
    made = TargetServer()
    async with made.up():
        yield made


def secret(path: Path, text: str) -> Path:
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


def quick(**more: Any) -> NotifySettings:
    return replace(
        NotifySettings(
            settle_s=0.0, retry_first_s=0.05, retry_most_s=0.2, within_s=5.0,
            dashboard_url="https://everstep.example",
        ),
        **more,
    )  # fmt: skip


def webhook_only(server: TargetServer, **more: Any) -> NotifySettings:
    return quick(webhook=WebhookSettings(url=f"{server.url}/hook"), **more)


def all_targets(server: TargetServer, folder: Path, **more: Any) -> NotifySettings:
    return quick(
        webhook=WebhookSettings(
            url=f"{server.url}/hook", secret_file=secret(folder / "hmac", WEBHOOK_SECRET)
        ),
        slack=SlackSettings(
            url_file=secret(folder / "slack", f"{server.url}/services/{SLACK_SECRET}")
        ),
        pagerduty=PagerDutySettings(
            routing_key_file=secret(folder / "pd", ROUTING_KEY), url=f"{server.url}/v2/enqueue"
        ),
        alertmanager=AlertmanagerSettings(url=server.url),
        **more,
    )


@asynccontextmanager
async def at_work(settings: NotifySettings, bus: NatsBus) -> AsyncIterator[Notifications]:
    made = Notifications(settings, bus, SystemClock())
    task = asyncio.create_task(made.work_for_ever())
    try:
        await leading(made)
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def leading(made: Notifications) -> None:
    """It has written from when on it sends."""
    await until_async(lambda: made.statistics()["leading"] == 1, "a replica that leads")
    await until_async(lambda: made.is_reading, "a replica that reads")


async def record(bus: NatsBus, *facts: Fact) -> None:
    now = datetime.now(UTC)
    await asyncio.gather(*(bus.record(replace(fact, at=now)) for fact in facts))
    await bus.flush(30)


async def taken(server: TargetServer, many: int) -> list[tuple[str, str]]:
    """Paths and states of this number of messages."""
    await until_async(lambda: len(server.taken) >= many, f"{many} messages")
    return [(one.path, one.headers.get("idempotency-key", "")) for one in server.taken]


def target_counts(replica: Notifications, target: str = "webhook") -> dict[str, float]:
    """What was counted for one target."""
    return replica.by_target()[target]


def exits(ranks: Iterable[int]) -> list[Fact]:
    return [
        RankExited(
            id=f"exit-{rank}", job="j", at=datetime.now(UTC), source="agent/n", round=1,
            node=f"n{rank // 8}", slot=rank // 8, local_rank=rank % 8, rank=rank,
            pid=100 + rank, lasted_s=1.0, how="failed", exit_code=1,
            incident="i1",
        )
        for rank in ranks
    ]  # fmt: skip


async def test_a_thousand_ranks_are_one_message_and_one_resolve_for_each_target(
    bus: NatsBus, server: TargetServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A11.5."""
    caplog.set_level(logging.DEBUG, "everstep_services")
    async with at_work(all_targets(server, tmp_path, settle_s=1.0), bus) as replica:
        facts = [opened("i1"), *exits(range(1000)), extended("i1", 1000), judged("i1", "gpu")]
        await record(bus, *facts)
        await taken(server, 4)
        await record(bus, closed("i1"))
        await taken(server, 8)
        await until_async(lambda: replica.statistics()["open"] == 0, "the notice to be done")
    by_path: dict[str, list[Any]] = {}
    for heard in server.heard:
        by_path.setdefault(heard.path, []).append(heard)
    assert {path: len(heard) for path, heard in by_path.items()} == {
        "/hook": 2, "/v2/enqueue": 2, "/api/v2/alerts": 2, f"/services/{SLACK_SECRET}": 2,
    }  # fmt: skip
    assert [one.key for one in by_path["/hook"]] == ["j/i1/firing", "j/i1/resolved"]
    first, last = (one.json for one in by_path["/hook"])
    assert (first["state"], first["cause"], first["affected_ranks"]) == ("firing", "gpu", 1000)
    assert (last["state"], last["outcome"], last["lost_s"]) == ("resolved", "recovered", 7.5)
    assert first["link"] == "https://everstep.example/incidents/i1"
    events = [check_pagerduty(one.json) for one in by_path["/v2/enqueue"]]
    assert [one["event_action"] for one in events] == ["trigger", "resolve"]
    assert len({one["dedup_key"] for one in events}) == 1
    alerts = [check_alerts(one.json)[0] for one in by_path["/api/v2/alerts"]]
    assert alerts[0]["labels"] == alerts[1]["labels"]
    for one in by_path[f"/services/{SLACK_SECRET}"]:
        check_slack(one.json)
    for word in (SLACK_SECRET, ROUTING_KEY, WEBHOOK_SECRET):
        assert word not in caplog.text


async def test_a_verdict_that_comes_after_the_end_is_one_further_message_to_slack_and_webhook(
    bus: NatsBus, server: TargetServer, tmp_path: Path
) -> None:
    """A11.5: the first verdict was "unknown", and the job trained again before the next."""
    async with at_work(all_targets(server, tmp_path), bus) as replica:
        await record(bus, opened("i1"), judged("i1", "unknown"), closed("i1"))
        await taken(server, 4)
        await until_async(lambda: replica.statistics()["open"] == 0, "all targets to have it")
        await record(bus, judged("i1", "host", 1))
        await taken(server, 6)
        await until_async(lambda: replica.statistics()["open"] == 0, "the further messages")
    late = {heard.path: heard for heard in server.heard[4:]}
    assert set(late) == {"/hook", f"/services/{SLACK_SECRET}"}
    assert {heard.key for heard in late.values()} == {"j/i1/update-1"}
    news = late["/hook"].json
    assert (news["state"], news["step"], news["cause"]) == ("resolved", "update", "host")
    message = check_slack(late[f"/services/{SLACK_SECRET}"].json)
    assert message["text"].startswith("[Changed] j: incident recovered (host)")


async def test_a_message_is_repeated_with_the_same_key_until_it_is_taken(
    bus: NatsBus, server: TargetServer
) -> None:
    server.plan = [(500, {}), "drop", (429, {"Retry-After": "1"}), "hang", (408, {})]
    async with at_work(webhook_only(server, within_s=1.0), bus) as replica:
        await record(bus, opened("i1"))
        await taken(server, 1)
        await until_async(lambda: target_counts(replica)["waiting"] == 0, "nothing to wait")
        assert target_counts(replica)["retries"] == 5
    assert [one.key for one in server.heard] == ["j/i1/firing"] * 6
    assert len({one.body for one in server.heard}) == 1


async def test_a_target_has_the_message_once_its_status_says_so(
    bus: NatsBus, server: TargetServer
) -> None:
    """The text of its answer may be late, or never come: the message is not sent again."""
    server.plan = ["late text"]
    async with at_work(webhook_only(server, within_s=1.0), bus) as replica:
        await record(bus, opened("i1"))
        await taken(server, 1)
        await until_async(lambda: target_counts(replica)["waiting"] == 0, "nothing to wait")
        assert target_counts(replica)["retries"] == 0
    assert len(server.heard) == 1


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


async def test_a_replica_that_takes_over_knows_for_how_long_a_target_has_failed(
    bus: NatsBus, server: TargetServer, nats: DevServer, tmp_path: Path
) -> None:
    """A11.5: otherwise each moment without the lease would postpone the alert."""
    server.status = 503
    documents = bus.documents(BUCKET)

    async def failing() -> int:
        return len(decode_as((await documents.get(CLUSTER)).data or b"", NoticesDocument).failing)

    async with at_work(webhook_only(server), bus) as first:
        await record(bus, opened("i1"))
        await until_async(failing, "a failure on the bus")
        await until_async(lambda: target_counts(first)["failing_seconds"] > 2, "some time")
        before_s = target_counts(first)["failing_seconds"]
    assert target_counts(first)["failing_seconds"] == 0
    other = connect(nats.settings(SERVICE), "history", spool=tmp_path / "other")
    async with other as second_bus, at_work(webhook_only(server), second_bus) as second:
        await until_async(lambda: target_counts(second)["failing_seconds"] > 0, "its time")
        assert target_counts(second)["failing_seconds"] > before_s - 1
        server.status = 202
        await second.test()
        await until_async(lambda: target_counts(second)["failing_seconds"] == 0, "a success")
        await until_async(lambda: target_counts(second)["waiting"] == 0, "nothing to wait")
        await until_async(failing, "the success on the bus", holds=lambda count: count == 0)


async def test_a_target_that_hangs_is_tried_with_one_message_and_then_gets_all(
    bus: NatsBus, server: TargetServer
) -> None:
    """Each attempt is at the message that was not tried for the longest time."""
    server.plan = ["hang"] * 4
    async with at_work(webhook_only(server, within_s=1.0), bus):
        await record(bus, *(opened(f"i{number}", job=f"j{number}") for number in range(4)))
        await taken(server, 4)
    tried = [heard.key for heard in server.heard]
    assert len(set(tried[:4])) == 4
    assert sorted(tried[:4]) == sorted(tried[4:])


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


async def test_a_replica_that_takes_over_forgets_nothing_and_repeats_with_the_same_key(
    bus: NatsBus, server: TargetServer, nats: DevServer, tmp_path: Path
) -> None:
    """The first one ends after a target has the message, and before that is written down."""
    settings = webhook_only(server)
    first = Notifications(settings, bus, SystemClock())
    working = asyncio.create_task(first.work_for_ever())
    await leading(first)

    async def end_the_first() -> None:
        server.before_answer = None
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working

    server.before_answer = end_the_first
    await record(bus, opened("i1"))
    await until_async(working.done, "the first replica to be gone")
    other = connect(nats.settings(SERVICE), "history", spool=tmp_path / "other")
    async with other as second_bus, at_work(settings, second_bus):
        await until_async(lambda: len(server.heard) == 2, "the message once more")
        await record(bus, closed("i1"))
        await until_async(lambda: len(server.heard) == 3, "its end")
    keys = [one.key for one in server.heard]
    assert keys == ["j/i1/firing", "j/i1/firing", "j/i1/resolved"]
    assert server.heard[0].body == server.heard[1].body
    async with at_work(settings, bus) as third:
        await record(bus, opened("i2", job="k"))
        await until_async(lambda: len(server.heard) == 4, "the next incident")
        assert server.heard[3].key == "k/i2/firing"
        assert third.statistics()["open"] == 1


async def test_of_two_replicas_one_sends(
    bus: NatsBus, server: TargetServer, nats: DevServer, tmp_path: Path
) -> None:
    settings = webhook_only(server)
    other = connect(nats.settings(SERVICE), "history", spool=tmp_path / "other")
    async with other as second_bus, at_work(settings, bus):
        second = Notifications(settings, second_bus, SystemClock())
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(second.work_for_ever())
            for number in range(5):
                await record(bus, opened(f"i{number}", job=f"j{number}"))
            await taken(server, 5)
            assert second.statistics()["leading"] == 0
            task.cancel()
    assert len(server.heard) == 5


async def test_hostile_texts_mention_nobody_and_show_no_secret(
    bus: NatsBus, server: TargetServer, tmp_path: Path
) -> None:
    bad = (
        "<!channel> @here <https://evil.example|ok> \x1b[31m\u202e password=hunter22 " + "x" * 9000
    )
    async with at_work(all_targets(server, tmp_path), bus):
        await record(bus, opened("i1", reason=bad), judged("i1", "<!here>", reason=bad))
        await taken(server, 4)
    for heard in server.heard:
        text = heard.body.decode()
        assert "hunter22" not in text
        assert "\\u001b" not in text.replace("\\\\u001b", "")
        assert "\u202e" not in text
        assert len(text) < 20_000
        if heard.path.startswith("/services"):
            assert "<" not in text
            assert "@" not in text
    check_pagerduty(next(one.json for one in server.heard if one.path == "/v2/enqueue"))


async def test_pings_come_while_messages_would_be_sent(
    bus: NatsBus, server: TargetServer, tmp_path: Path
) -> None:
    url = secret(tmp_path / "ping", f"{server.url}/ping/0f7c-uuid")
    settings = quick(dead_man=DeadManSettings(url_file=url, every_s=1.0))
    async with at_work(settings, bus) as replica:
        await until_async(lambda: len(server.heard) >= 2, "two pings")
        assert {(one.method, one.path) for one in server.heard} == {("GET", "/ping/0f7c-uuid")}
        await until_async(lambda: replica.statistics()["pings_total"] >= 2, "pings counted")
    assert replica.statistics()["ping_failures_total"] == 0


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


async def test_a_test_message_says_what_each_target_answers(
    server: TargetServer, tmp_path: Path, bus: NatsBus
) -> None:
    server.plan = [(403, {})]
    replica = Notifications(all_targets(server, tmp_path), bus, SystemClock())
    (refused,) = await replica.test(["slack"])
    assert (refused.target, refused.is_taken) == ("slack", False)
    assert refused.text.startswith("status 403")
    assert SLACK_SECRET not in refused.text
    found = await replica.test()
    assert {one.target for one in found} == {"webhook", "slack", "pagerduty", "alertmanager"}
    assert all(one.is_taken for one in found)
    assert await replica.test(["teams"]) == []
    actions = [one.json["event_action"] for one in server.heard if one.path == "/v2/enqueue"]
    assert actions == ["trigger", "resolve"]
    alerts = [one.json[0] for one in server.heard if one.path.endswith("/alerts")]
    assert len(alerts) == 2
    ends = [datetime.fromisoformat(alert["endsAt"]) for alert in alerts]
    assert ends[1] <= datetime.now(UTC) < ends[0], "the second one resolves the first"
    assert alerts[0]["labels"] == alerts[1]["labels"]


@pytest.mark.parametrize("is_owed", [True, False])
async def test_what_ended_before_the_first_replica_led_is_sent_where_it_is_owed(
    bus: NatsBus, server: TargetServer, is_owed: bool
) -> None:
    """`everstep up` and `everstep run` note when they began; a fleet that adds a target does not.

    Otherwise a new target would be sent what happened before it was set.
    """
    if is_owed:
        began = datetime.now(UTC).timestamp()
        await begin(bus, began)
        await begin(bus, began + 3600)  # a later start changes nothing
    await record(bus, job_ended("failed", job="before"))
    async with at_work(webhook_only(server), bus):
        if is_owed:
            await until_async(lambda: is_told(server, "before"), "what is owed")
        await record(bus, job_ended("failed", job="after"))
        await until_async(lambda: is_told(server, "after"), "what happens now")
    assert is_told(server, "before") == is_owed


def is_told(server: TargetServer, job: str) -> bool:
    return any(heard.json["job"] == job for heard in server.taken)


async def last_messages(replica: Notifications, within_s: float = 30.0) -> list[str]:
    """What was reported as not sent at the end of a process that nobody takes over from."""
    stop, unsent = asyncio.Event(), list[str]()
    stop.set()
    await replica.send_last(stop, unsent.append, within_s)
    return unsent


async def test_a_process_that_ends_sends_at_once_what_it_holds(
    bus: NatsBus, server: TargetServer
) -> None:
    """A standalone run does not wait for its notices to settle, and does not end before them."""
    async with at_work(webhook_only(server, settle_s=3600.0), bus) as replica:
        await record(bus, opened("i1"), job_ended("failed", incident="i1"))
        assert await last_messages(replica) == []
        assert [heard.json["event"] for heard in server.taken] == ["job_failed"]


async def test_a_process_that_ends_reports_which_messages_its_targets_did_not_take(
    bus: NatsBus, server: TargetServer
) -> None:
    """One sentence with target, count and reason; the other targets have theirs."""
    server.status = 500
    async with at_work(webhook_only(server, settle_s=3600.0), bus) as replica:
        await record(bus, job_ended("failed"))
        (sentence,) = await last_messages(replica, within_s=3.0)
    assert "1 to webhook (status 500" in sentence
    assert "the next start on this state directory sends them" in sentence
