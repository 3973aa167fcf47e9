"""What `deliver` promises: who heard it, at once, and never a guess."""

from datetime import UTC, datetime

import pytest

from everstep import ids, subjects
from everstep.bus.errors import BusError, BusTimeoutError
from everstep.bus.ports import Bus
from everstep.messages import JobEnded, NodeBeat, StandBy
from everstep.messages.codec import decode


def order(job: str) -> StandBy:
    return StandBy(id=ids.new_id(), job=job, round=1, reason="test")


async def test_what_a_subscriber_took_in_was_delivered(two: tuple[Bus, Bus], job: str) -> None:
    sender, other = two
    sent = order(job)
    async with other.subscribe(subjects.order(job, "n1"), StandBy) as orders:
        assert await sender.deliver(subjects.order(job, "n1"), sent, within_s=40)
        assert await orders.get() == sent


async def test_the_sender_may_be_the_one_who_hears(bus: Bus, job: str) -> None:
    async with bus.subscribe(subjects.order(job), StandBy):
        assert await bus.deliver(subjects.order(job), order(job), within_s=40)


async def test_one_of_two_subscribers_is_enough_and_both_hear_it(
    two: tuple[Bus, Bus], job: str
) -> None:
    sender, other = two
    sent = order(job)
    async with (
        sender.subscribe(subjects.order(job), StandBy) as here,
        other.subscribe(subjects.order(job), StandBy) as there,
    ):
        assert await sender.deliver(subjects.order(job), sent, within_s=40)
        assert await here.get() == await there.get() == sent


async def test_where_nobody_listens_the_sender_is_told_at_once(bus: Bus, job: str) -> None:
    async with bus.subscribe(subjects.order(job, "n2"), StandBy):
        assert not await bus.deliver(subjects.order(job, "n1"), order(job), within_s=60)


async def test_who_stopped_listening_is_nobody(two: tuple[Bus, Bus], job: str) -> None:
    sender, other = two
    async with other.subscribe(subjects.order(job), StandBy):
        assert await sender.deliver(subjects.order(job), order(job), within_s=40)
    await other.deliver(subjects.order(job), order(job), within_s=40)  # after the unsubscribe
    assert not await sender.deliver(subjects.order(job), order(job), within_s=60)


async def test_a_listener_who_cannot_take_it_is_no_proof_of_anything(bus: Bus, job: str) -> None:
    async with bus.subscribe(subjects.order(job), NodeBeat):
        with pytest.raises(BusTimeoutError) as caught:
            await bus.deliver(subjects.order(job), order(job), within_s=0.2)
    assert isinstance(caught.value, BusError)


async def test_who_hears_facts_does_not_answer_in_the_streams_place(
    two: tuple[Bus, Bus], job: str
) -> None:
    bus, other = two
    fact = JobEnded(
        id=ids.new_id(),
        job=job,
        at=datetime.now(UTC),
        source="test",
        state="done",
        exit_code=0,
        reason="test",
    )
    async with other.subscribe(subjects.fact(job, "job_ended"), JobEnded) as heard:
        await bus.record(fact)
        await bus.flush(40)
        assert await heard.get() == fact
    async with bus.facts(None) as reader:
        found = []
        while fact not in found:
            found += [decode(one.data) for one in (await reader.fetch(1000, 2)).facts]
