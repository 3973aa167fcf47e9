"""Health judges nobody while it cannot write: most servers of the bus may be out of its reach."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from everstep_services.health.observer import WriteProof
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock
from tests.waiting import turns


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def backs() -> list[float]:
    """When servers were reached again."""
    return []


@pytest.fixture
async def proof(
    server: MemoryServer, clock: FakeClock, backs: list[float]
) -> AsyncIterator[WriteProof]:
    proof = WriteProof(MemoryBus(server), clock, lambda: backs.append(clock.now()))
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(proof.write_for_ever())
        await turns()
        yield proof
        writing.cancel()


async def ticks(proof: WriteProof, clock: FakeClock, *needed: bool) -> list[float]:
    """How far behind the proof is at each tick."""
    lags = []
    for is_needed in needed:
        now = clock.now()
        lags.append(round(now - proof.proven_at(now, is_needed=is_needed), 3))
        await turns(5)
        await clock.advance(0.1)
        await turns(5)
    return lags


async def test_a_write_proves_what_was_heard_before_it(proof: WriteProof, clock: FakeClock) -> None:
    assert max(await ticks(proof, clock, False, True, True, True, False, False)) <= 0.1


async def test_without_an_answer_nothing_is_proven_however_often_it_is_asked(
    proof: WriteProof, clock: FakeClock, server: MemoryServer, backs: list[float]
) -> None:
    server.acknowledges = False
    lags = await ticks(proof, clock, True, True, False, True, False, False)
    assert lags == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert backs == []
    server.acknowledges = True
    await ticks(proof, clock, False)
    assert (await ticks(proof, clock, False, False))[-1] == 0
    assert len(backs) == 1
