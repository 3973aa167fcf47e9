"""What is collected is kept, or has a reason: whatever the store of evidence says."""

import asyncio
from contextlib import suppress

from everstep.bus.errors import BusRefusedError
from everstep.messages import BlobRef, EvidenceCollected, Fact
from everstep_services.agent.collectors.collection import EvidenceFound, Piece
from everstep_services.agent.telemetry.evidence import Collections
from everstep_services.agent.telemetry.facts import AgentFacts
from tests.fakes.bus import MemoryBlobs, MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock


class FullBlobs(MemoryBlobs):
    """Refuses this number of pieces, as a store that is full does."""

    def __init__(self, times: int) -> None:
        super().__init__(MemoryServer())
        self.times = times
        self.asked = 0

    async def put(self, job: str, data: bytes) -> BlobRef:
        self.asked += 1
        if self.asked <= self.times:
            raise BusRefusedError("a blob", 10077, "maximum bytes exceeded")
        return await super().put(job, data)


class FullBus(MemoryBus):
    """A bus with such a store."""

    def __init__(self, times: int) -> None:
        super().__init__(MemoryServer())
        self.full = FullBlobs(times)

    @property
    def blobs(self) -> FullBlobs:
        return self.full


async def kept(times: int) -> tuple[EvidenceCollected, FullBlobs]:
    clock, bus = FakeClock(), FullBus(times)
    facts: asyncio.Queue[Fact] = asyncio.Queue()
    records = AgentFacts("j", "n1", clock)
    collections = Collections("j", bus, records, facts.put_nowait, clock)
    collections.collected(1, "i1", [Piece("log", EvidenceFound("the end", b"text"), rank=3)])
    loops = [
        asyncio.create_task(loop())
        for loop in (collections.collect_for_ever, collections.collect_later_for_ever)
    ]
    try:
        async with asyncio.timeout(30):
            while facts.empty():
                await clock.advance(1.0)
            fact = facts.get_nowait()
    finally:
        for loop in loops:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
    assert isinstance(fact, EvidenceCollected)
    return fact, bus.full


async def test_a_store_that_is_full_is_asked_once_more_and_the_fact_says_so() -> None:
    """No loop, and a reason instead of the piece (A4.4)."""
    fact, blobs = await kept(times=100)
    assert blobs.asked == 2
    assert fact.blob is None
    assert "maximum bytes exceeded" in fact.missing


async def test_a_store_that_refuses_for_a_moment_keeps_it_later() -> None:
    fact, _ = await kept(times=1)
    assert (fact.rank, fact.missing) == (3, "")
    assert fact.blob is not None
