"""What messages tell, on a real bus, to real HTTP servers."""

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everstep.bus.client import NatsBus
from everstep.clock import SystemClock
from everstep.messages import Fact, RankExited
from everstep_services.history.notifications.service import Notifications
from everstep_services.history.notifications.settings import DeadManSettings
from tests.fakes.clock import LeapingClock
from tests.integration.history.notifications.replicas import (
    ROUTING_KEY,
    SLACK_SECRET,
    WEBHOOK_SECRET,
    all_targets,
    at_work,
    notices_on_bus,
    quick,
    record,
    secret,
    taken,
)
from tests.integration.history.notifications.targets import TargetServer
from tests.unit.history.notice_facts import closed, extended, judged, opened
from tests.unit.history.notification_schemas import check_alerts, check_pagerduty, check_slack
from tests.waiting import until_async


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
    clock, settings = LeapingClock(), all_targets(server, tmp_path, settle_s=60.0)
    async with at_work(settings, bus, clock) as replica:
        facts = [opened("i1"), *exits(range(1000)), extended("i1", 1000), judged("i1", "gpu")]
        await record(bus, *facts)
        await until_async(
            lambda: notices_on_bus(bus),
            "all of it is read",
            holds=lambda notices: "j/i1" in notices and notices["j/i1"].cause == "gpu",
        )
        clock.leap(settings.settle_s)
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
    clock, settings = LeapingClock(), all_targets(server, tmp_path, settle_s=60.0)
    async with at_work(settings, bus, clock) as replica:
        await record(bus, opened("i1"), judged("i1", "unknown"), closed("i1"))
        await until_async(
            lambda: notices_on_bus(bus),
            "all of it is read",
            holds=lambda notices: "j/i1" in notices and bool(notices["j/i1"].outcome),
        )
        clock.leap(settings.settle_s)
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
