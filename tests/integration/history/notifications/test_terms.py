"""Replicas that take over, begin or end: no notice is lost, and one replica sends."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.clock import SystemClock
from everstep.messages import NoticesDocument
from everstep.messages.codec import decode_as
from everstep.subjects import CLUSTER
from everstep_services.history.notifications.documents import BUCKET, begin
from everstep_services.history.notifications.service import Notifications
from tests.integration.history.notifications.replicas import (
    at_work,
    leading,
    notices_on_bus,
    record,
    taken,
    target_counts,
    webhook_only,
)
from tests.integration.history.notifications.targets import TargetServer
from tests.unit.history.notice_facts import closed, job_ended, opened
from tests.waiting import until_async


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
        await until_async(
            lambda: notices_on_bus(bus),
            "it is written, so that the next replica does not send it again",
            holds=lambda notices: [one.state for one in notices["j/i1"].targets] == ["resolved"],
        )
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
