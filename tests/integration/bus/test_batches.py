"""Many facts reach the stream as one batch; without batches they arrive all the same."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from everstep.bus import connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.errors import MessageTooLargeError
from everstep.bus.server.dev_server import DevServer
from everstep.messages import MAX_MESSAGE_BYTES, JobEnded, encode
from tests.integration.bus.facts import ended, numbers, settings_of
from tests.waiting import WITHIN_S

BATCH_LEAST = 32
COUNT = 300
PATIENCE_S = 2 * WITHIN_S
"""A batch that is not answered would be waited for so long."""


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    settings = settings_of(nats, request_within_s=PATIENCE_S)
    async with connect(settings, "test", spool=tmp_path / "spool") as bus:
        await topology.init(bus.jetstream)
        yield bus


async def record(bus: NatsBus, job: str, count: int = COUNT) -> list[JobEnded]:
    facts = [msgspec.structs.replace(ended(number), job=job) for number in range(count)]
    await asyncio.gather(*(bus.record(fact) for fact in facts))
    await bus.flush(WITHIN_S)
    return facts


async def batched(bus: NatsBus) -> list[bool]:
    """Of each fact in the stream whether it came with a batch."""
    last = (await bus.jetstream.api("STREAM.INFO.FACTS"))["state"]["last_seq"]
    stored = [
        await bus.jetstream.api("STREAM.MSG.GET.FACTS", {"seq": number + 1})
        for number in range(last)
    ]
    return [b"Nats-Batch-Id" in b64decode(each["message"]["hdrs"]) for each in stored]


async def test_facts_that_wait_together_are_one_batch(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    """Also those of an agent, whose facts cross from another account."""
    settings = msgspec.structs.replace(await nats.grant("j"), request_within_s=PATIENCE_S)
    async with connect(settings, "agent", spool=tmp_path / "agent") as agent:
        await record(agent, "j")
    found = await batched(bus)
    assert len(found) == COUNT
    assert sum(found) >= BATCH_LEAST
    assert await numbers(bus, COUNT) == list(range(COUNT))


async def test_a_batch_with_a_known_fact_is_sent_one_by_one(nats: DevServer, bus: NatsBus) -> None:
    facts = await record(bus, "j", 1)
    more = [msgspec.structs.replace(ended(number), job="j") for number in range(1, COUNT)]
    await asyncio.gather(*(bus.record(fact) for fact in (*facts, *more)))
    await bus.flush(WITHIN_S)
    assert await numbers(bus, COUNT) == list(range(COUNT))
    assert len(await batched(bus)) == COUNT


async def test_a_stream_without_batches_gets_all_facts(nats: DevServer, bus: NatsBus) -> None:
    config = (await bus.jetstream.api("STREAM.INFO.FACTS"))["config"]
    await bus.jetstream.api("STREAM.UPDATE.FACTS", {**config, "allow_atomic": False})
    await record(bus, "j")
    assert await batched(bus) == [False] * COUNT
    assert await numbers(bus, COUNT) == list(range(COUNT))
    assert "FACTS corrected" in await topology.init(bus.jetstream)


async def test_a_denied_fact_holds_up_no_batch(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    """As the last one it is the fact with which the batch would have ended."""
    settings = msgspec.structs.replace(await nats.grant("j"), request_within_s=PATIENCE_S)
    async with connect(settings, "agent", spool=tmp_path / "agent") as agent:
        forged = msgspec.structs.replace(ended(0), job="other")
        allowed = [msgspec.structs.replace(ended(number), job="j") for number in range(COUNT)]
        await asyncio.gather(*(agent.record(fact) for fact in (*allowed, forged)))
        await agent.flush(WITHIN_S)
        assert agent.statistics()["facts_rejected_total"] == 1
    assert forged.id in (tmp_path / "agent" / "rejected").read_text()
    assert await numbers(bus, COUNT) == list(range(COUNT))


async def test_a_fact_that_is_too_large_holds_back_none_of_those_recorded_with_it(
    bus: NatsBus,
) -> None:
    reason = "x" * (MAX_MESSAGE_BYTES - len(encode(ended(1))) - 100)
    large = msgspec.structs.replace(ended(1), reason=reason)
    with pytest.raises(MessageTooLargeError):
        await bus.record(ended(0), large, ended(2))
    await bus.flush(WITHIN_S)
    assert await numbers(bus, 2) == [0, 2]
