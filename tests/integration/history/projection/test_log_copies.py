"""The replica that projects copies the ends of logs out of the real stream of evidence."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from everstep.bus import connect
from everstep.bus.errors import BusUnreachableError
from everstep.bus.ports import Blobs
from everstep.bus.server.dev_server import DevServer
from everstep.messages import BlobRef
from everstep.store.database import Database
from everstep.store.evidence_copies import EvidenceCopies, EvidenceCopy
from everstep_services.history.log_copy import LogCopier
from tests.fakes.bus import MemoryBlobs
from tests.fakes.clock import NotedClock
from tests.integration.conftest import Api
from tests.unit.history.facts import make
from tests.waiting import until_async

TAIL = "the last line\n"


@asynccontextmanager
async def copying(
    api: Api, blobs: Blobs, *, most_bytes: int = 1 << 20
) -> AsyncIterator[NotedClock]:
    clock = NotedClock(most_s=0.01)
    copier = LogCopier(
        EvidenceCopies(api.database), blobs, api.notifier, clock=clock, most_bytes=most_bytes
    )
    async with asyncio.TaskGroup() as tasks:
        loop = copier.copy_for_ever(is_mine=lambda: api.is_projecting)
        task = tasks.create_task(loop, name="copier")
        yield clock
        task.cancel()


async def until_copied(database: Database, ref: BlobRef) -> EvidenceCopy:
    return await until_async(lambda: EvidenceCopies(database).find(ref.id), f"a copy of {ref.id}")


async def test_what_real_agents_store_is_copied(api: Api, shared_nats: DevServer, job: str) -> None:
    """History keeps its own copy of the end of a log (A4.4)."""
    async with connect(shared_nats.settings("service"), "history") as bus, copying(api, bus.blobs):
        ref = await bus.blobs.put(job, TAIL.encode())
        lost = BlobRef(job=job, id="0" * 32, size_bytes=5, parts=1)
        await api.add(make("rank_exited", job=job, log=ref))
        await api.add(make("evidence_collected", job=job, blob=lost))
        assert await until_copied(api.database, ref) == EvidenceCopy(TAIL.encode(), None)
        absent = (await until_copied(api.database, lost)).absent
    assert absent is not None
    assert "maximum age" in absent


async def test_a_bus_that_is_away_is_waited_for(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    get, refusals = MemoryBlobs.get, [1, 2, 3]

    async def sometimes(blobs: MemoryBlobs, ref: BlobRef) -> bytes:
        if refusals:
            refusals.pop()
            raise BusUnreachableError("no connection")
        return await get(blobs, ref)

    monkeypatch.setattr(MemoryBlobs, "get", sometimes)
    ref = await api.bus.blobs.put("j", TAIL.encode())
    await api.add(make("rank_exited", log=ref))
    async with copying(api, api.bus.blobs) as clock:
        assert (await until_copied(api.database, ref)).data == TAIL.encode()
    assert len(clock.waits) >= 3


async def test_who_does_not_project_copies_nothing(api: Api) -> None:
    api.is_projecting = False
    ref = await api.bus.blobs.put("j", TAIL.encode())
    await api.add(make("rank_exited", log=ref))
    async with copying(api, api.bus.blobs) as clock:
        await until_async(lambda: len(clock.waits) >= 3, "it has looked three times")
        assert await EvidenceCopies(api.database).find(ref.id) is None
        api.is_projecting = True
        assert (await until_copied(api.database, ref)).data == TAIL.encode()
