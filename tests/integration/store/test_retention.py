"""Old jobs leave the record as units, while another writes, on both databases (A11.6)."""

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sqlalchemy import func, select

from everstep.bus.errors import BusUnreachableError
from everstep.bus.topology import CHECKPOINTS
from everstep.ids import id_from
from everstep.messages import CheckpointsDocument, Fact, KnownCheckpoint
from everstep.messages.rank_logs import LogIndex
from everstep.store import tables
from everstep.store.database import Database
from everstep.store.evidence_copies import EvidenceCopies
from everstep.store.job_removal import JobRemovals
from everstep.store.log import FactLog
from everstep.store.times import to_us
from everstep_services.history.retention import JobRetention
from everstep_services.history.settings import HistorySettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock
from tests.integration.store.test_log import new, projected
from tests.unit.history.story import back, begun, killed
from tests.waiting import turns

OLD_DAYS = 400


class Record:
    """A database with jobs of different ages, and the service that removes old ones."""

    def __init__(self, database: Database, log: FactLog) -> None:
        self.database = database
        self.log = log
        self.clock = FakeClock()
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.removals = JobRemovals(database)
        self.sequence = 0

    async def add(self, job: str, days_ago: float, *changes: Fact) -> None:
        """The story of a job, received some days ago."""
        facts = [_of(job, fact) for fact in (*begun(), *killed(), *back(), *changes)]
        received = self.clock.wall() - timedelta(days=days_ago)
        self.sequence += len(facts)
        await self.log.append(
            "s", new(facts, self.sequence), sequence=self.sequence, received_us=to_us(received)
        )

    def retention(self, **settings: Any) -> JobRetention:
        clock = _Hasty()
        clock_wall = self.clock.wall
        clock.wall = clock_wall  # type: ignore[method-assign]
        return JobRetention(
            HistorySettings(**settings), self.removals, self.bus, clock, self.bus.record, id_from
        )

    async def jobs(self) -> list[str]:
        async with self.database.read() as connection:
            return list((await connection.execute(select(tables.jobs.c.job))).scalars())

    async def rows_of(self, job: str) -> dict[str, int]:
        """How many rows each table has of a job."""
        counts = {}
        async with self.database.read() as connection:
            for table in tables.metadata.sorted_tables:
                if "job" in table.c and table is not tables.nodes:
                    query = select(func.count()).select_from(table).where(table.c.job == job)
                    if count := (await connection.execute(query)).scalar_one():
                        counts[table.name] = count
        return counts


class _Hasty(FakeClock):
    async def sleep(self, seconds: float) -> None:
        await turns()


def _of(job: str, fact: Fact) -> Fact:
    """The fact as one of another job, with ids of its own."""
    return replace(fact, job=job, id=f"{job}-{fact.id}"[:64])


@pytest.fixture
def record(database: Database, fact_log: FactLog) -> Record:
    return Record(database, fact_log)


async def test_an_old_job_goes_as_a_whole_and_others_stay_as_they_were(record: Record) -> None:
    await record.add("young", 1)
    before = await projected(record.database)
    await record.add("old", OLD_DAYS)
    ref = await record.bus.blobs.put("old", b"evidence")
    await EvidenceCopies(record.database).keep(ref, b"evidence", absent=None, now_us=1)
    await record.bus.rank_logs.put_index(LogIndex(job="old", round=1, node="n", at_us=1))
    assert len(await record.rows_of("old")) > 5
    retention = record.retention()
    assert await retention.remove_old() == 1
    assert await record.rows_of("old") == {}
    assert await record.jobs() == ["young"]
    after = await projected(record.database)
    for table in before:
        if table not in {"nodes"}:
            assert after[table] == before[table], table
    assert not record.server.blobs
    assert not record.server.log_indexes
    assert await record.removals.unfinished() == []
    assert retention.statistics()["jobs_total"] == 1
    [audit] = [fact for fact in record.server.facts if b"remove_job" in fact.data]
    assert b'"target":"old"' in audit.data
    assert b"history.keep_jobs_days = 365" in audit.data
    assert await retention.remove_old() == 0


async def test_what_is_pinned_labelled_or_corrected_stays(record: Record) -> None:
    for job in ("pinned", "plain"):
        await record.add(job, OLD_DAYS)
    checkpoint = KnownCheckpoint(step=7, tier="global", pinned_by="ada")
    index = CheckpointsDocument(checkpoints=(checkpoint,))
    data = msgspec.json.encode(index)
    await record.bus.documents(CHECKPOINTS).put("pinned", data, revision=0)
    retention = record.retention()
    assert await retention.remove_old() == 1
    assert await record.jobs() == ["pinned"]
    assert retention.statistics()["kept"] == 1


async def test_nothing_goes_while_it_cannot_be_known_what_is_pinned(record: Record) -> None:
    await record.add("old", OLD_DAYS)
    await record.server.set_up(False)
    with pytest.raises(BusUnreachableError):
        await record.retention().remove_old()
    assert await record.jobs() == ["old"]


async def test_for_ever_is_for_ever(record: Record) -> None:
    await record.add("old", 10 * OLD_DAYS)
    assert await record.retention(keep_jobs_days=0).remove_old() == 0
    assert await record.jobs() == ["old"]


async def test_a_removal_that_was_begun_is_finished_by_another_replica(record: Record) -> None:
    await record.add("old", OLD_DAYS)
    removal = await record.removals.begin("old", 1)
    assert await record.removals.remove_some(removal, 3)
    assert await record.jobs() == []  # at once: it is removed as a unit
    assert await record.rows_of("old") != {}
    assert await record.retention().remove_old() == 1
    assert await record.rows_of("old") == {}


async def test_a_rebuild_in_parallel_brings_nothing_back(record: Record) -> None:
    await record.add("old", OLD_DAYS)
    await record.add("young", 1)
    removal = await record.removals.begin("old", 1)
    for _ in range(4):
        await record.removals.remove_some(removal, 3)
    await record.log.start_rebuild()
    while await record.log.catch_up(10):
        pass
    assert await record.retention().remove_old() == 1
    assert await record.rows_of("old") == {}
    assert await record.jobs() == ["young"]


async def test_a_writer_goes_on_in_parallel(record: Record) -> None:
    """Each page is a small transaction: facts are written between pages."""
    for number in range(4):
        await record.add(f"old-{number}", OLD_DAYS)
    removing = asyncio.create_task(record.retention().remove_old())
    written = 0
    while not removing.done():
        await record.add(f"new-{written}", 0)
        written += 1
    assert await removing == 4
    assert sorted(await record.jobs()) == sorted(f"new-{number}" for number in range(written))
