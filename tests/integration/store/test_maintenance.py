"""Notices of maintenance in both databases: taken by replicas at once, and in any order (A11.5)."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from everstep.store.database import Database, open_database
from everstep.store.maintenance import MaintenanceNotice, MaintenanceNotices

_REPLICAS = 3
_OUTCOME = "cancelled by ops"
_NOTICE = MaintenanceNotice(
    sender="ops", id="CHG-1", node="node-1", action="drain", starts_us=10_000, ends_us=None,
    reason="fans", sent_us=1_000, received_us=1_000, next_us=10_000,
)  # fmt: skip


@pytest.fixture
async def replicas(database: Database, database_url: str) -> AsyncIterator[list[Database]]:
    """Several processes' views of one database."""
    async with open_database(database_url) as second, open_database(database_url) as third:
        yield [database, second, third]


@pytest.fixture
def notices(replicas: list[Database]) -> list[MaintenanceNotices]:
    return [MaintenanceNotices(each) for each in replicas]


def _of(node: str, sent_us: int = 1_000, starts_us: int = 10_000) -> MaintenanceNotice:
    return replace(_NOTICE, node=node, sent_us=sent_us, starts_us=starts_us, next_us=starts_us)


async def test_the_same_message_to_all_replicas_at_once_is_one_notice(
    notices: list[MaintenanceNotices],
) -> None:
    """A sender that repeats itself, or a load balancer that does: nothing fails, all agree."""
    nodes = [f"node-{number}" for number in range(8)]
    messages = [[_of(node) for node in order] for order in (nodes, nodes[::-1], nodes)]
    answers = await asyncio.gather(
        *(each.put(message) for each, message in zip(notices * 3, messages * 3, strict=True))
    )
    assert not any(change.is_stale for answer in answers for change in answer)
    assert [len(answer) for answer in answers] == [8] * 9
    assert await notices[0].waiting("ops") == 8


async def test_a_due_notice_is_taken_by_one_replica(notices: list[MaintenanceNotices]) -> None:
    await notices[0].put([_of(f"node-{number}") for number in range(20)])
    taken = await asyncio.gather(*(each.take_due(20_000, 90_000, 50) for each in notices * 2))
    nodes = sorted(notice.node for answer in taken for notice in answer)
    assert nodes == sorted(f"node-{number}" for number in range(20))
    assert await notices[1].take_due(20_000, 90_000, 50) == []
    assert len(await notices[1].take_due(90_000, 95_000, 50)) == 20, "their replica has died"


async def test_messages_about_times_end_the_same_in_every_order(
    notices: list[MaintenanceNotices],
) -> None:
    """The one that was signed last holds, whichever arrives last (reordered, late, repeated)."""
    sent = [(1_000, 50_000), (2_000, 70_000), (3_000, 60_000)]
    for number, order in enumerate(itertools.permutations(sent)):
        for sent_us, starts_us in (*order, order[0]):
            await notices[number % _REPLICAS].put([_of(f"n-{number}", sent_us, starts_us)])
        assert await notices[0].take_due(59_999, 80_000, 50) == []
        (due,) = await notices[0].take_due(60_000, 80_000, 50)
        assert (due.node, due.starts_us) == (f"n-{number}", 60_000)
        await notices[0].end(due, "done", "it left")


async def test_a_cancelled_id_stays_cancelled_whatever_arrives_later(
    notices: list[MaintenanceNotices],
) -> None:
    """Also what was signed before, names another node, or is the first that is heard of it."""
    shown, cancelled = await notices[0].cancel("ops", "CHG-1", at_us=2_000, outcome=_OUTCOME)
    assert (shown, cancelled) == ([], 0)
    for node, sent_us in (("node-1", 1_000), ("node-1", 1_000), ("node-2", 9_000)):
        (change,) = await notices[1].put([_of(node, sent_us)])
        assert (change.notice.state, change.notice.outcome) == ("cancelled", _OUTCOME)
        assert change.is_stale
    (other,) = await notices[1].put([replace(_of("node-1"), sender="another")])
    assert other.notice.state == "waiting", "ids are a sender's own"
    (due,) = await notices[2].take_due(99_000, 99_999, 50)
    assert due.sender == "another"
    _, cancelled = await notices[2].cancel(None, "CHG-1", at_us=3_000, outcome="by ann")
    assert cancelled == 1, "a person's word is about all senders"
    (again,) = await notices[0].put([replace(_of("node-9"), sender="another")])
    assert again.notice.state == "cancelled"


async def test_a_cancellation_at_the_moment_of_the_notice_wins(
    notices: list[MaintenanceNotices],
) -> None:
    for number in range(10):
        id_ = f"CHG-{number}"
        await asyncio.gather(
            notices[0].put([replace(_of("node-1"), id=id_)]),
            notices[1].cancel("ops", id_, at_us=2_000, outcome=_OUTCOME),
        )
    assert await notices[2].take_due(99_000, 99_999, 50) == []


async def test_the_record_does_not_deny_what_was_done(notices: list[MaintenanceNotices]) -> None:
    await notices[0].put([_of("node-1")])
    (due,) = await notices[0].take_due(20_000, 90_000, 50)
    await notices[1].cancel("ops", "CHG-1", at_us=2_000, outcome=_OUTCOME)
    await notices[0].end(due, "done", "node-1 leaves")
    (change,) = await notices[0].put([_of("node-1")])
    assert (change.notice.state, change.notice.outcome) == (
        "done",
        "node-1 leaves; cancelled too late",
    )


async def test_a_cancelled_notice_that_waited_for_a_service_stays_cancelled(
    notices: list[MaintenanceNotices],
) -> None:
    await notices[0].put([_of("node-1")])
    (due,) = await notices[0].take_due(20_000, 90_000, 50)
    await notices[1].cancel("ops", "CHG-1", at_us=2_000, outcome=_OUTCOME)
    await notices[0].end(due, "waiting", "tried again soon")
    assert await notices[0].take_due(99_000, 99_999, 50) == []


async def test_old_notices_are_forgotten(notices: list[MaintenanceNotices]) -> None:
    day_us = 86_400_000_000
    await notices[0].put([_of("node-1"), _of("node-2", starts_us=200 * day_us)])
    await notices[0].cancel("ops", "CHG-0", at_us=0, outcome=_OUTCOME)
    (due,) = await notices[0].take_due(20_000, 90_000, 50)
    await notices[0].end(due, "done", "it left")
    await notices[0].forget_old(91 * day_us)
    changes = await notices[0].put([_of("node-1"), _of("node-2"), replace(_NOTICE, id="CHG-0")])
    assert [change.notice.state for change in changes] == ["waiting"] * 3
