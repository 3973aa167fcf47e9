"""What every bus promises: run over the one in memory and over the real server."""

import asyncio
import dataclasses
from datetime import UTC, datetime

import pytest

from everstep import ids, subjects
from everstep.bus.errors import (
    AskRefusedError,
    AskTimeoutError,
    BlobMissingError,
    ConflictError,
    LeaseLostError,
    NobodyAnswersError,
)
from everstep.bus.ports import Bus, Document
from everstep.bus.requests import RefusalError
from everstep.errors import EverstepError
from everstep.messages import (
    BlobRef,
    Done,
    Fact,
    JobEnded,
    Message,
    NodeBeat,
    NodeTimings,
    ShowRound,
)
from everstep.messages.codec import decode
from tests.waiting import until_async


def beat(job: str, sequence: int = 1) -> NodeBeat:
    return NodeBeat(job=job, node="n1", sequence=sequence, at=datetime.now(UTC), state="running")


def ended(job: str, reason: str = "test") -> JobEnded:
    return JobEnded(
        id=ids.new_id(),
        job=job,
        at=datetime.now(UTC),
        source="test",
        state="failed",
        exit_code=1,
        reason=reason,
    )


# -- beats ---------------------------------------------------------------------------------


async def test_a_subscriber_hears_its_own_job_only(two: tuple[Bus, Bus], job: str) -> None:
    bus, sender = two
    async with bus.subscribe(subjects.beat(job), NodeBeat) as heard:
        sender.send(subjects.beat("other", "n1"), beat("other"))
        sender.send(subjects.beat(job, "n1"), beat(job))
        assert (await heard.get()).job == job


async def test_beats_arrive_in_the_order_they_were_sent(two: tuple[Bus, Bus], job: str) -> None:
    bus, sender = two
    async with bus.subscribe(subjects.beat(job), NodeBeat) as heard:
        for number in range(500):
            sender.send(subjects.beat(job, "n1"), beat(job, number))
        taken = [(await heard.get()).sequence for _ in range(100)]
        heard.take_at_once(lambda message: taken.append(message.sequence))
        await until_async(lambda: len(taken), "all are taken", holds=lambda n: n == 500)
        assert taken == list(range(500))


async def test_a_full_inbox_drops_the_oldest_and_counts_them(bus: Bus, job: str) -> None:
    async with (
        bus.subscribe(subjects.beat(job), NodeBeat, capacity=3) as slow,
        bus.subscribe(subjects.beat(job), NodeBeat) as quick,
    ):
        for number in range(10):
            bus.send(subjects.beat(job, "n1"), beat(job, number))
        for _ in range(10):
            await quick.get()
        await until_async(lambda: slow.dropped, "seven are dropped", holds=lambda n: n == 7)
        assert [(await slow.get()).sequence for _ in range(3)] == [7, 8, 9]
        assert slow.dropped == 7


async def test_messages_of_another_type_are_passed_over(bus: Bus, job: str) -> None:
    async with bus.subscribe(subjects.beat(job), NodeTimings | NodeBeat) as both:  # type: ignore[arg-type]
        bus.send(subjects.beat(job, "n1"), ended(job))
        bus.send(subjects.beat(job, "n1"), beat(job))
        assert isinstance(await both.get(), NodeBeat)


async def test_a_message_about_another_job_than_its_subject_is_skipped_and_counted(
    bus: Bus, job: str
) -> None:
    async with bus.subscribe(subjects.beat(job), NodeBeat) as heard:
        bus.send(subjects.beat(job, "n1"), beat("another"))
        bus.send(subjects.beat(job, "n1"), beat(job))
        assert (await heard.get()).job == job
        assert heard.undecodable == 1


# -- facts ---------------------------------------------------------------------------------


async def read_job(bus: Bus, job: str, count: int) -> list[Fact]:
    found: list[Fact] = []
    async with bus.facts(None) as reader:
        while len(found) < count:
            batch = await reader.fetch(1000, 2)
            facts = [decode(one.data) for one in batch.facts]
            found += [fact for fact in facts if isinstance(fact, Fact) and fact.job == job]
    return found


async def test_facts_are_read_in_the_order_they_were_recorded(bus: Bus, job: str) -> None:
    facts = [ended(job, f"reason {number}") for number in range(50)]
    for fact in facts[:25]:
        await bus.record(fact)
    await bus.record(*facts[25:])
    assert await read_job(bus, job, 50) == facts


async def test_a_fact_recorded_twice_is_there_once(bus: Bus, job: str) -> None:
    fact, last = ended(job), ended(job, "last")
    for one in (fact, fact, fact, last):
        await bus.record(one)
    assert await read_job(bus, job, 2) == [fact, last]


async def test_a_reader_goes_on_from_its_position(bus: Bus, job: str) -> None:
    facts = [ended(job, f"reason {number}") for number in range(20)]
    for fact in facts:
        await bus.record(fact)
    await bus.flush(40)
    position = None
    seen: list[Message] = []
    while len(seen) < 20:
        async with bus.facts(position) as reader:  # as a process that restarts again and again
            batch = await reader.fetch(7, 2)
        position = batch.position
        here = [decode(one.data) for one in batch.facts]
        seen += [fact for fact in here if isinstance(fact, Fact) and fact.job == job]
    assert seen == facts


async def test_a_fetch_with_nothing_to_read_ends_in_time(bus: Bus, job: str) -> None:
    last = ended(job)
    await bus.record(last)
    async with bus.facts(None) as reader:
        while last not in [decode(one.data) for one in (await reader.fetch(1000, 2)).facts]:
            pass
        assert (await reader.fetch(10, 0.05)).facts == []


# -- questions -----------------------------------------------------------------------------


async def test_a_question_is_answered(two: tuple[Bus, Bus], job: str) -> None:
    asker, service = two

    async def show(question: Message) -> Message:
        assert isinstance(question, ShowRound)
        return Done(text=f"about {question.job}")

    async with service.answer(f"svc-{job}", {"show": show}):
        answer = await asker.ask(
            f"svc-{job}", "show", ShowRound(job=job), Done, job=job, within_s=40
        )
    assert answer == Done(text=f"about {job}")


async def test_without_a_replica_the_asker_is_told_at_once(bus: Bus, job: str) -> None:
    with pytest.raises(NobodyAnswersError, match="nobody answers"):
        await bus.ask(f"no-{job}", "show", ShowRound(job=job), Done, job=job, within_s=10)


class _WontError(EverstepError):
    pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefusalError("409", "the round has moved on"), "409"),
        (_WontError("not today"), "422"),
        (KeyError("a bug"), "500"),
    ],
)
async def test_an_error_reaches_the_asker_with_its_code(
    two: tuple[Bus, Bus], job: str, error: Exception, code: str
) -> None:
    asker, service = two

    async def fail(_: Message) -> Message:
        raise error

    async with service.answer(f"svc-{job}", {"show": fail}):
        with pytest.raises(AskRefusedError) as caught:
            await asker.ask(f"svc-{job}", "show", ShowRound(job=job), Done, job=job, within_s=40)
    assert caught.value.code == code
    assert code == "500" or str(error) in caught.value.text


async def test_a_question_about_another_job_than_its_subject_is_refused(
    two: tuple[Bus, Bus], job: str
) -> None:
    asker, service = two

    async def show(_: Message) -> Message:
        return Done()

    async with service.answer(f"svc-{job}", {"show": show}):
        with pytest.raises(AskRefusedError) as caught:
            await asker.ask(f"svc-{job}", "show", ShowRound(job="b"), Done, job=job, within_s=40)
    assert caught.value.code == "403"


async def test_a_service_that_takes_too_long_is_named(two: tuple[Bus, Bus], job: str) -> None:
    asker, service = two
    never = asyncio.Event()

    async def hang(_: Message) -> Message:
        await never.wait()
        return Done()

    async with service.answer(f"svc-{job}", {"show": hang}):
        with pytest.raises(AskTimeoutError, match=f"svc-{job} did not answer show"):
            await asker.ask(f"svc-{job}", "show", ShowRound(job=job), Done, job=job, within_s=0.1)


# -- documents -----------------------------------------------------------------------------


async def test_only_one_of_two_writers_of_a_revision_wins(two: tuple[Bus, Bus], job: str) -> None:
    one, other = (bus.documents("ROUNDS") for bus in two)
    first = await one.put(job, b"first", revision=0)
    second = await other.put(job, b"second", revision=first)
    with pytest.raises(ConflictError, match=f"revision {first}"):
        await one.put(job, b"third", revision=first)
    with pytest.raises(ConflictError):
        await one.put(job, b"anew", revision=0)
    assert await one.get(job) == Document(job, b"second", second)


async def test_a_deleted_document_can_be_made_again(bus: Bus, job: str) -> None:
    rounds = bus.documents("ROUNDS")
    revision = await rounds.put(job, b"first", revision=0)
    await rounds.delete(job, revision=revision)
    assert (await rounds.get(job)).data is None
    assert job not in await rounds.keys()
    again = await rounds.put(job, b"second", revision=0)
    assert again > revision
    assert job in await rounds.keys()


async def test_following_shows_now_and_then_what_changes(two: tuple[Bus, Bus], job: str) -> None:
    one, other = (bus.documents("LIMITS") for bus in two)
    revision = await one.put(job, b"before", revision=0)
    async with other.follow(job) as news:
        assert (await anext(news)).data == b"before"
        revision = await one.put(job, b"after", revision=revision)
        assert (await anext(news)).data == b"after"
        await one.delete(job, revision=revision)
        assert (await anext(news)).data is None


async def test_following_a_bucket_shows_every_key(two: tuple[Bus, Bus], job: str) -> None:
    one, other = (bus.documents("CONTROL") for bus in two)
    await one.put(f"{job}.a", b"a", revision=0)
    async with other.follow() as news:
        await one.put(f"{job}.b", b"b", revision=0)
        seen: set[str] = set()
        while seen != {f"{job}.a", f"{job}.b"}:
            document = await anext(news)
            if document.key.startswith(job):
                seen.add(document.key)


# -- leases --------------------------------------------------------------------------------


async def test_a_lease_has_one_holder_and_a_growing_token(two: tuple[Bus, Bus], job: str) -> None:
    one, other = (bus.leases for bus in two)
    held = await one.acquire(job, "one", 30)
    assert held is not None
    assert await other.acquire(job, "other", 30) is None
    renewed = await one.renew(held)
    assert renewed.token > held.token
    await one.release(renewed)
    taken = await other.acquire(job, "other", 30)
    assert taken is not None
    assert taken.token > renewed.token
    with pytest.raises(LeaseLostError):
        await one.renew(renewed)


async def test_a_lease_that_was_not_renewed_goes_to_the_next(
    two: tuple[Bus, Bus], job: str
) -> None:
    one, other = (bus.leases for bus in two)
    held = await one.acquire(job, "one", 1)
    assert held is not None
    taken = await until_async(
        lambda: other.acquire(job, "other", 30), "a second is over by the server's clock"
    )
    assert taken.token > held.token
    with pytest.raises(LeaseLostError):
        await one.renew(held)
    await one.release(held)  # too late: it must not free the other's
    assert await one.acquire(job, "one", 30) is None


async def test_renewing_keeps_a_lease_mortal(two: tuple[Bus, Bus], job: str) -> None:
    one, other = (bus.leases for bus in two)
    held = await one.acquire(job, "one", 30)
    assert held is not None
    await one.renew(dataclasses.replace(held, ttl_s=1))
    await until_async(lambda: other.acquire(job, "other", 30), "it is free again")


# -- blobs and proof -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 700_000, 3_000_000])
async def test_a_blob_comes_back_as_it_was(two: tuple[Bus, Bus], job: str, size: int) -> None:
    data = bytes(i * 7919 % 251 for i in range(size % 4096)) * max(1, size // 4096)
    ref = await two[0].blobs.put(job, data)
    assert await two[0].blobs.put(job, data) == ref  # the same content is the same blob
    assert await two[1].blobs.get(ref) == data


async def test_a_blob_that_is_gone_says_so(bus: Bus, job: str) -> None:
    with pytest.raises(BlobMissingError):
        await bus.blobs.get(BlobRef(job=job, id="0" * 32, size_bytes=10, parts=1))


async def test_the_blobs_of_a_job_are_removed(bus: Bus, job: str) -> None:
    refs = [await bus.blobs.put(name, b"evidence" * 9) for name in (job, f"{job}-2")]
    await bus.blobs.remove(job)
    with pytest.raises(BlobMissingError):
        await bus.blobs.get(refs[0])
    assert await bus.blobs.get(refs[1]) == b"evidence" * 9


async def test_blobs_stay_as_long_as_the_server_says(bus: Bus) -> None:
    assert await bus.blobs.keeps_s() == 30 * 86_400


async def test_the_bus_proves_itself(bus: Bus) -> None:
    """A probe is stored, and read back (A1.2)."""
    await bus.prove()
    assert bus.connected
