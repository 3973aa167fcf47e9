"""The server dies, hangs, loses its data: what was recorded arrives, once and in order."""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import structs

from everstep import subjects
from everstep.bus import connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.errors import FactsWaitingError, SpoolFullError
from everstep.bus.server.dev_server import DevServer, dev_server
from everstep.messages import Done, JobEnded, Message, NodeBeat, ShowRound
from everstep.messages.codec import decode, encode
from tests.integration.bus.facts import beat, ended, numbers, settings_of
from tests.integration.bus.servers import killed_with_its_data, relay, stopped
from tests.waiting import WITHIN_S, turns, until_async

PING_EVERY_S = 10.0
"""A server that stands for some seconds loses no client."""


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with connect(settings_of(nats), "test", spool=tmp_path / "spool") as bus:
        await topology.init(bus.jetstream)
        yield bus


async def away(bus: NatsBus) -> None:
    await until_async(lambda: not bus.connected, "the connection is gone")


async def again(nats: DevServer, restarts: int, bus: NatsBus) -> None:
    """The server was started again this number of times, and the bus is connected to it."""
    await until_async(
        lambda: bus.connected and nats.restarts,
        f"connected after {restarts} restarts",
        holds=lambda found: found == restarts,
    )


def cut(bus: NatsBus) -> None:
    transport = bus.jetstream.connection.client._transport
    assert transport is not None
    transport.close()  # type: ignore[no-untyped-call]


@asynccontextmanager
async def down(nats: DevServer, bus: NatsBus) -> AsyncIterator[None]:
    """While the body runs there is no server. Its keeper would bring it back at once."""
    await stopped(nats.pid)
    cut(bus)
    await away(bus)
    try:
        yield
    finally:
        os.kill(nats.pid, signal.SIGCONT)


async def test_facts_recorded_while_the_server_is_away_arrive_in_order(
    nats: DevServer, bus: NatsBus
) -> None:
    """290 facts wait in the spool (A14.1)."""
    for number in range(10):
        await bus.record(ended(number))
    async with down(nats, bus):
        for number in range(10, 300):
            await bus.record(ended(number))
        with pytest.raises(FactsWaitingError, match="safe in the spool but not yet in the stream"):
            await bus.flush(0.05)
        assert bus.statistics()["facts_pending_bytes"] > 0
    await bus.flush(20)
    assert await numbers(bus, 300) == list(range(300))


async def test_killing_the_server_under_load_loses_nothing_and_doubles_nothing(
    nats: DevServer, bus: NatsBus
) -> None:
    """Three kills, and each fact is there once (A14.1)."""
    count, is_over = 0, False

    async def load() -> None:
        nonlocal count
        while not is_over and count < 2000:  # each is written to the disk
            await bus.record(ended(count))
            count += 1

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load())
        for kills in range(1, 4):
            os.kill(nats.pid, signal.SIGKILL)
            await again(nats, kills, bus)
        is_over = True
    await bus.flush(20)
    found = await numbers(bus, count)
    assert found == list(range(count))
    info = await bus.jetstream.api("STREAM.INFO.FACTS")
    assert info["state"]["messages"] == count


async def test_facts_of_a_process_that_was_killed_are_sent_by_the_next(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    spool = tmp_path / "other"
    async with connect(settings_of(nats), "first", spool=spool) as first:
        async with down(nats, first):
            for number in range(50):
                await first.record(ended(number))
            # it ends here, with everything still in its spool
            await asyncio.wait_for(_close(first), WITHIN_S)
        shutil.copytree(spool, tmp_path / "as-it-was")
    async with connect(settings_of(nats), "second", spool=tmp_path / "as-it-was") as second:
        await second.flush(20)
    assert await numbers(bus, 50) == list(range(50))


async def _close(bus: NatsBus) -> None:
    assert bus.statistics()["facts_pending_bytes"] > 0


async def test_after_the_data_were_wiped_the_streams_come_back_and_facts_go_on(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    """The streams are made again, and the reader begins anew (A14.3)."""
    await bus.record(ended(1))
    await bus.flush(40)
    async with bus.facts(None) as reader, asyncio.TaskGroup() as tasks:
        first = await reader.fetch(10, 2)
        keeping = tasks.create_task(topology.keep_for_ever(bus.jetstream))
        await killed_with_its_data(nats, tmp_path / "own-nats" / "nats" / "store")
        await until_async(lambda: nats.restarts, "the server is started again")
        await bus.record(ended(2))
        await bus.flush(20)
        batch = await reader.fetch(10, 5)
        while not batch.facts:
            batch = await reader.fetch(10, 5)
        keeping.cancel()
    assert isinstance(fact := decode(batch.facts[0].data), JobEnded)
    assert fact.exit_code == 2
    assert batch.position.stream != first.position.stream
    assert batch.position.sequence == 1


async def test_a_connection_that_came_back_is_counted_however_short_it_was_away(
    bus: NatsBus,
) -> None:
    assert bus.returns == 0
    for times in (1, 2):
        cut(bus)
        await until_async(lambda: bus.returns, f"{times} returns", holds=times.__eq__)
        assert bus.connected


async def test_beats_sent_while_the_server_is_away_are_bounded_and_the_newest_arrive(
    nats: DevServer, bus: NatsBus
) -> None:
    async with bus.subscribe(subjects.beat("j"), NodeBeat, capacity=10_000) as heard:
        async with down(nats, bus):
            for sequence in range(10_000):
                bus.send(subjects.beat("j", "n"), beat(sequence))
        last = await heard.get()
        while last.sequence < 9_999:
            last = await heard.get()
    numbers = bus.statistics()
    assert numbers["send_dropped_total"] >= 10_000 - 4_096
    assert numbers["beats_waiting"] == 0


async def test_a_server_that_hangs_is_left_and_found_again(nats: DevServer) -> None:
    """Silence without RST is noticed by pings (A14.5)."""
    settings = settings_of(nats, ping_interval_s=0.1)
    async with connect(settings, "pinging") as bus:
        await stopped(nats.pid)  # no RST, no FIN: only silence
        await away(bus)
        os.kill(nats.pid, signal.SIGCONT)
        await until_async(
            lambda: bus.statistics()["reconnects_total"] and bus.connected, "it is back"
        )


async def test_a_server_that_was_stopped_is_not_started_again(nats: DevServer) -> None:
    await nats.stop()
    async with asyncio.timeout(20):
        await nats.keep_running()
    assert nats.restarts == 0


@pytest.mark.parametrize("how", ["async", "blocking"])
async def test_a_handler_that_takes_long_costs_no_connection(
    nats: DevServer, bus: NatsBus, how: str
) -> None:
    """Async and blocking handlers; others are answered meanwhile (A14.6)."""
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: Message) -> Message:
        started.set()
        if how == "blocking":
            leap(6 * PING_EVERY_S)
        else:
            await go_on.wait()
        return Done(text="slow")

    async def quick(_: Message) -> Message:
        return Done(text="quick")

    async with (
        connect(settings_of(nats, ping_interval_s=PING_EVERY_S), "busy") as busy,
        busy.answer("busy", {"slow": slow, "quick": quick}),
        asyncio.TaskGroup() as tasks,
    ):
        question = ShowRound(job="j")
        asking = tasks.create_task(bus.ask("busy", "slow", question, Done, job="j", within_s=300))
        await started.wait()
        answer = await bus.ask("busy", "quick", question, Done, job="j", within_s=300)
        assert answer.text == "quick"
        go_on.set()
        assert (await asking).text == "slow"
        assert busy.connected
        assert busy.statistics()["reconnects_total"] == 0


def leap(seconds: float) -> None:
    """As a handler that computes for so long: what was due meanwhile is due when it returns."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def test_a_followed_document_is_seen_although_its_announcement_was_lost(
    nats: DevServer,
) -> None:
    """The follower reads back what it did not hear (A14.5)."""
    async with connect(settings_of(nats, verify_every_s=0.1), "following") as bus:
        await topology.init(bus.jetstream)
        config = (await bus.jetstream.api("STREAM.INFO.KV_LIMITS"))["config"]
        config.pop("republish")  # from now on nothing is announced
        await bus.jetstream.api("STREAM.DELETE.KV_LIMITS")
        await bus.jetstream.api("STREAM.CREATE.KV_LIMITS", config)
        limits = bus.documents("LIMITS")
        async with limits.follow("j") as news:
            assert (await anext(news)).data is None
            await limits.put("j", b"unheard", revision=0)
            assert (await anext(news)).data == b"unheard"
            await limits.delete("j", revision=None)
            assert (await anext(news)).data is None


async def test_a_follower_sees_what_changed_while_it_was_cut_off(
    nats: DevServer, bus: NatsBus
) -> None:
    """The connection is cut, then the server is killed (A14.5)."""
    async with connect(settings_of(nats), "other") as other:
        limits = bus.documents("LIMITS")
        async with limits.follow("j") as news:
            assert (await anext(news)).data is None
            cut(bus)
            await other.documents("LIMITS").put("j", b"meanwhile", revision=0)
            assert (await anext(news)).data == b"meanwhile"
            os.kill(nats.pid, signal.SIGKILL)
            await again(nats, 1, other)
            await other.documents("LIMITS").put("j", b"after", revision=None)
            assert (await anext(news)).data == b"after"


async def test_rubbish_and_messages_from_the_future_are_skipped_counted_and_said_once(
    bus: NatsBus, caplog: pytest.LogCaptureFixture
) -> None:
    client = bus.jetstream.connection.client
    async with bus.subscribe(subjects.beat("j"), NodeBeat) as heard:
        for data in (b"rubbish", b'{"type":"node_beat.v9","job":"j"}', b"\xff" * 100):
            await client.publish(subjects.beat("j", "n"), data)
        bus.send(subjects.beat("j", "n"), beat(7))
        assert (await heard.get()).sequence == 7
        assert heard.undecodable == 3
        assert bus.statistics()["undecodable_total"] == 3
    assert caplog.text.count("message_skipped") == 1


async def test_messages_with_and_without_headers_keep_their_order(bus: NatsBus) -> None:
    """Those without are heard at once, those with come through nats-py's queue."""
    client = bus.jetstream.connection.client
    rng = random.Random(7)
    async with bus.subscribe(subjects.beat("j"), NodeBeat) as heard:
        for number in range(2000):
            headers = {"X": "y"} if rng.random() < 0.3 else None
            await client.publish(subjects.beat("j", "n"), encode(beat(number)), headers=headers)
        assert [(await heard.get()).sequence for _ in range(2000)] == [*range(2000)]


async def test_a_full_spool_refuses_facts_while_beats_go_on(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    settings = settings_of(nats, spool_max_bytes=10_000)
    async with connect(settings, "small", spool=tmp_path / "small") as small:
        async with down(nats, small):
            with pytest.raises(SpoolFullError, match="raise spool_max_bytes"):
                for number in range(1000):
                    await small.record(ended(number))
            small.send(subjects.beat("j", "n"), beat(1))
        await small.flush(20)
        await until_async(lambda: small.statistics()["sent_total"], "the beat is sent")
        await small.record(ended(5000))


async def test_without_a_bus_a_process_starts_and_records(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    await stopped(nats.pid)
    settings = settings_of(nats, connect_within_s=0.3)
    async with connect(settings, "early", spool=tmp_path / "early", wait=False) as early:
        await early.record(ended(1))
        assert not early.connected
        os.kill(nats.pid, signal.SIGCONT)
        await early.flush(20)
    assert await numbers(bus, 1) == [1]


@pytest.mark.parametrize(
    "said",
    [b"PING\r\n", b'INFO {"server_id":"S","version":"2.12.0","max_payload":1048576}\r\n'],
    ids=["ping", "info"],
)
async def test_a_busy_server_that_speaks_of_something_else_first_is_connected_to(
    nats: DevServer, bus: NatsBus, tmp_path: Path, said: bytes
) -> None:
    """It asks who is there, as many log in at once: taken for the answer, all went dumb (A14.2)."""
    async with relay(nats.url, before_answer=said) as url:
        settings = structs.replace(settings_of(nats), url=url)
        async with connect(settings, "meant", spool=tmp_path / "meant") as meant:
            await meant.record(ended(1))
            await meant.flush(20)
            cut(meant)
            await meant.record(ended(2))
            await meant.flush(20)
    assert await numbers(bus, 2) == [1, 2]


async def test_no_reader_is_left_on_the_server(bus: NatsBus) -> None:
    await bus.record(ended(1))
    for _ in range(20):
        async with bus.facts(None) as reader:
            await reader.fetch(10, 2)
    info = await bus.jetstream.api("STREAM.INFO.FACTS")
    assert info["state"]["consumer_count"] == 0


async def test_after_a_flush_the_stream_has_every_recorded_fact(bus: NatsBus) -> None:
    for count in range(1, 200):
        await bus.record(ended(count))
        await bus.flush(40)
        info = await bus.jetstream.api("STREAM.INFO.FACTS")
        assert info["state"]["messages"] == count


async def test_facts_that_the_stream_dropped_unread_are_counted(bus: NatsBus) -> None:
    for number in range(10):
        await bus.record(ended(number))
    await bus.flush(40)
    async with bus.facts(None) as reader:
        first = await until_async(lambda: reader.fetch(3, 2), "some", holds=lambda it: it.facts)
    assert first.missed == 0
    config = (await bus.jetstream.api("STREAM.INFO.FACTS"))["config"]
    await bus.jetstream.api("STREAM.UPDATE.FACTS", {**config, "max_msgs": 2})
    left: list[int] = []
    missed = 0
    async with bus.facts(first.position) as reader:
        while len(left) < 2:
            after = await reader.fetch(10, 2)
            left += [one.sequence for one in after.facts]
            missed += after.missed
    assert left == [9, 10]
    assert missed == 8 - first.position.sequence


@pytest.mark.timeout(180)  # six servers are started
async def test_a_server_killed_right_after_it_acknowledged_still_has_the_fact(
    tmp_path: Path,
) -> None:
    """With `sync_interval: always` (A14.4)."""
    async with (
        dev_server(tmp_path / "always", sync="always") as nats,
        connect(settings_of(nats), "test", spool=tmp_path / "spool") as bus,
    ):
        await topology.init(bus.jetstream)
        for number in range(6):
            await bus.record(ended(number))
            await bus.flush(20)
            os.kill(nats.pid, signal.SIGKILL)
            await again(nats, number + 1, bus)
            info = await bus.jetstream.api("STREAM.INFO.FACTS")
            assert info["state"]["messages"] == number + 1


async def test_who_is_cancelled_while_it_subscribes_is_cancelled(bus: NatsBus) -> None:
    async def listen() -> None:
        async with bus.subscribe(subjects.beat("j"), NodeBeat) as inbox:
            async for _ in inbox:
                pass

    for count in range(12):
        listening = asyncio.create_task(listen())
        await turns(count)
        listening.cancel()
        done, _ = await asyncio.wait([listening], timeout=WITHIN_S)
        assert done, f"it goes on after it was cancelled {count} turns after its begin"
        assert listening.cancelled()
