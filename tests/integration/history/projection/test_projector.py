"""The projector over a real database: nothing is lost or doubled, whatever fails."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from everstep import subjects
from everstep.bus import connect
from everstep.bus.ports import Bus, Delivered
from everstep.bus.server.dev_server import DevServer
from everstep.messages import Fact
from everstep.store import tables
from everstep.store.database import Database, StoreLimits, open_database
from everstep.store.log import FactLog, Fold
from everstep.store.projected.changes import Changes, LoggedFact
from everstep.store.projected.jobs import JOBS
from everstep.store.queries import stream_position
from everstep.store.schema import upgrade
from everstep_services.history.commands import rebuild
from everstep_services.history.notifier import LogNotifier
from everstep_services.history.projections.fold import fold
from everstep_services.history.projector import Projector
from everstep_services.history.settings import HistorySettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import NotedClock
from tests.unit.history.facts import delivered, make
from tests.waiting import until_async

WITHIN_S = 20.0
SETTINGS = HistorySettings(
    fetch_within_s=0.05, lease_ttl_s=30, pace_s=0, retry_first_s=0.01, retry_most_s=0.05
)


class Replica:
    """One projector and what it knows."""

    def __init__(
        self, database: Database, bus: Bus, name: str = "one", *, folded: Fold = fold
    ) -> None:
        self.database = database
        self.notifier = LogNotifier()
        self.projector = Projector(
            SETTINGS,
            bus,
            database,
            FactLog(database, folded),
            self.notifier,
            clock=NotedClock(most_s=0.02),
            name=name,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.projector.project_for_ever(), name="projector")
            yield
            task.cancel()

    async def reached(self, n: int) -> None:
        await self.notifier.wait_beyond(n - 1, WITHIN_S)
        assert self.notifier.last_n >= n, "the log did not grow in time"

    async def ids(self) -> list[str]:
        async with self.database.read() as connection:
            query = select(tables.facts.c.id).order_by(tables.facts.c.n)
            return list((await connection.execute(query)).scalars())


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def bus(server: MemoryServer) -> MemoryBus:
    return MemoryBus(server)


@pytest.fixture
def replica(database: Database, bus: MemoryBus) -> Replica:
    return Replica(database, bus)


async def record(bus: Bus, *facts: Fact) -> list[str]:
    for fact in facts:
        await bus.record(fact)
    return [fact.id for fact in facts]


def some(count: int) -> list[Fact]:
    return [make("rank_exited", rank=rank, how="error") for rank in range(count)]


async def test_facts_reach_the_tables_in_stream_order(replica: Replica, bus: MemoryBus) -> None:
    async with replica.running():
        sent = await record(bus, *some(5))
        await replica.reached(5)
    assert await replica.ids() == sent
    counted = replica.projector.statistics()
    assert (counted["facts_total"], counted["duplicates_total"]) == (5, 0)


async def test_a_new_projector_goes_on_where_the_last_one_was(
    replica: Replica, database: Database, bus: MemoryBus
) -> None:
    async with replica.running():
        first = await record(bus, *some(3))
        await replica.reached(3)
    second = await record(bus, *some(2))
    successor = Replica(database, bus, "two")
    async with successor.running():
        await successor.reached(5)
    assert await replica.ids() == [*first, *second]
    assert successor.projector.statistics()["duplicates_total"] == 0


async def test_it_waits_out_the_bus(replica: Replica, bus: MemoryBus, server: MemoryServer) -> None:
    async with replica.running():
        first = await record(bus, *some(2))
        await replica.reached(2)
        await server.set_up(False)
        second = await record(bus, *some(2))
        await server.set_up(True)
        await bus.flush(40)
        await replica.reached(4)
    assert await replica.ids() == [*first, *second]


async def test_it_reads_a_wiped_stream_from_its_start(
    replica: Replica, bus: MemoryBus, server: MemoryServer
) -> None:
    async with replica.running():
        first = some(4)
        await record(bus, *first)
        await replica.reached(4)
        await server.wipe()
        fresh = some(2)
        await record(bus, first[3], *fresh)
        await replica.reached(6)
    assert await replica.ids() == [fact.id for fact in [*first, *fresh]]
    assert await stream_position(replica.database) == ("memory-1", 3)


async def test_it_waits_out_a_locked_database(database_url: str, bus: MemoryBus) -> None:
    hasty = StoreLimits(lock_within_s=0.05)
    async with (
        open_database(database_url) as holder,
        open_database(database_url, limits=hasty) as database,
    ):
        await upgrade(holder)
        replica = Replica(database, bus)
        async with replica.running():
            first = await record(bus, *some(1))
            await replica.reached(1)
            async with holder.write() as connection:
                await connection.execute(select(tables.meta).with_for_update())
                sent = await record(bus, *some(3))
                await until_async(
                    lambda: replica.projector.statistics()["retries_total"],
                    "it has tried twice more",
                    holds=lambda retries: retries >= 2,
                )
            await replica.reached(4)
        assert await replica.ids() == [*first, *sent]


async def test_what_cannot_be_read_is_passed_and_counted(
    replica: Replica, bus: MemoryBus, server: MemoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    good = make("rank_exited")
    known = delivered(good, 0).data
    bad = [
        ("es.fact.j.rank_exited", b"\x00\xff not json"),
        ("es.fact.j.rank_exited", b"{}"),
        ("es.fact.j.node_beat", b'{"type":"node_beat.v1"}'),
        ("es.fact.other.rank_exited", known),
        ("es.fact.j.round_ended", known),
        ("es.fact.j.rank_exited", known.replace(b'"rank":', b'"rank":9999999999999999999')),
        ("es.fact.j.rank_exited", b"[" * 100_000),
    ]
    for subject, data in [*bad, *bad]:
        server.facts.append(Delivered(len(server.facts) + 1, subject, data))
    future = known.replace(b"rank_exited.v1", b"rank_evaporated.v3").replace(
        good.id.encode(), b"f" * 32
    )
    server.facts.append(Delivered(len(server.facts) + 1, "es.fact.j.rank_evaporated", future))
    server.facts.append(Delivered(len(server.facts) + 1, "es.fact.j.rank_exited", known))
    async with replica.running():
        await replica.reached(2)
    counted = replica.projector.statistics()
    assert (counted["refused_total"], counted["unknown_total"]) == (2 * len(bad), 1)
    assert await replica.ids() == ["f" * 32, good.id]
    assert await stream_position(replica.database) == ("memory-0", len(server.facts))
    complaints = [record for record in caplog.records if "fact_" in record.getMessage()]
    assert len(complaints) <= len(bad) + 1, "each only once"


async def test_a_value_that_cannot_be_stored_stops_only_its_own_fact(
    database: Database, bus: MemoryBus
) -> None:
    poison = make("round_started", round=1)

    def claims_too_much(recorded: Iterable[LoggedFact]) -> Changes:
        recorded = list(recorded)
        changes = fold(recorded)
        if any(one.fact.id == poison.id for one in recorded):
            changes.merge(JOBS, ("j",), restarts=2**70)
        return changes

    replica = Replica(database, bus, folded=claims_too_much)
    sent = some(6)
    await record(bus, *sent[:3], poison, *sent[3:])
    async with replica.running():
        await replica.reached(6)
    assert await replica.ids() == [fact.id for fact in sent]
    assert replica.projector.statistics()["unstorable_total"] == 1


async def test_a_fact_whose_claims_fail_is_in_the_log_and_stops_no_other(
    database: Database, bus: MemoryBus
) -> None:
    poison = make("round_started", round=1)

    def fails(recorded: Iterable[LoggedFact]) -> Changes:
        recorded = list(recorded)
        assert all(one.fact.id != poison.id for one in recorded)
        return fold(recorded)

    replica = Replica(database, bus, folded=fails)
    sent = [*some(3), poison, *some(3)]
    await record(bus, *sent)
    async with replica.running():
        await replica.reached(7)
    assert await replica.ids() == [fact.id for fact in sent]
    assert replica.projector.statistics()["unprojected_total"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"round": -1},
        {"round": 2**62},
        {"node": "n" * 200_000},
        {"id": "0" * 200_000},
        {"source": "s" * 200_000},
    ],
    ids=["negative round", "large round", "long node", "long id", "long source"],
)
async def test_a_number_or_name_out_of_bounds_is_refused_and_counted(
    replica: Replica, bus: MemoryBus, change: dict[str, Any]
) -> None:
    sent = some(2)
    bad = msgspec.structs.replace(make("rank_stalled", round=1, id="f" * 32), **change)
    await record(bus, sent[0], bad, sent[1])
    async with replica.running():
        await replica.reached(2)
    assert await replica.ids() == [fact.id for fact in sent]
    assert replica.projector.statistics()["refused_total"] == 1


async def test_only_one_of_two_writes_and_the_other_takes_over(
    database: Database, bus: MemoryBus
) -> None:
    one, two = Replica(database, bus, "one"), Replica(database, bus, "two")
    async with two.running():
        async with one.running():
            await until_async(
                lambda: one.projector.is_projecting != two.projector.is_projecting, "one of them"
            )
            first = await record(bus, *some(3))
            writer = one if one.projector.is_projecting else two
            await writer.reached(3)
            assert [one.projector.is_projecting, two.projector.is_projecting].count(True) == 1
        second = await record(bus, *some(3))
        await two.reached(6)
    assert await one.ids() == [*first, *second]


async def test_a_standby_notices_what_another_has_written(
    database: Database, bus: MemoryBus
) -> None:
    writer, standby = Replica(database, bus, "one"), Replica(database, bus, "two")
    async with writer.running(), asyncio.TaskGroup() as tasks:
        polling = tasks.create_task(standby.projector.poll_for_ever(), name="poll")
        await record(bus, *some(2))
        await standby.reached(2)
        polling.cancel()


async def test_a_rebuild_beside_it_loses_nothing(
    replica: Replica, database: Database, bus: MemoryBus
) -> None:
    async with replica.running():
        await record(bus, *some(50))
        await replica.reached(50)
        async with asyncio.TaskGroup() as tasks:
            rebuilding = tasks.create_task(rebuild(FactLog(database, fold), most=7))
            await record(bus, *some(20))
            await replica.reached(70)
        assert rebuilding.result() >= 50
        await record(bus, make("job_ended"))
        await replica.reached(71)
    async with database.read() as connection:
        job = (await connection.execute(select(tables.jobs))).mappings().one()
    assert (job["ranks_failed"], job["facts"], job["end_state"]) == (70, 71, "some state")


async def test_a_dropped_database_is_filled_again_from_the_stream(
    database_url: str, database: Database, bus: MemoryBus
) -> None:
    replica = Replica(database, bus)
    async with replica.running():
        sent = await record(bus, *some(5))
        await replica.reached(5)
    async with database.write() as connection:
        await connection.run_sync(tables.metadata.drop_all)
        await connection.exec_driver_sql("DROP TABLE alembic_version")
    async with open_database(database_url) as fresh:
        await upgrade(fresh)
        again = Replica(fresh, bus)
        async with again.running():
            await again.reached(5)
        assert await again.ids() == sent


async def test_it_reads_the_real_bus(database: Database, shared_nats: DevServer, job: str) -> None:
    async with (
        connect(shared_nats.settings("service"), "history-test") as bus,
        connect(shared_nats.settings("service"), "history-sender") as sender,
    ):
        replica = Replica(database, bus)
        mine = [make("rank_exited", job=job, rank=rank, how="error") for rank in range(30)]
        wanted = [fact.id for fact in mine]
        found: list[str] = []
        async with replica.running():
            for fact in mine:
                subject, id_header = subjects.fact(job, "rank_exited"), {"Nats-Msg-Id": fact.id}
                await sender.jetstream.publish(subject, delivered(fact, 0).data, id_header)
            async with asyncio.timeout(WITHIN_S):
                while len(found) < len(wanted):
                    await replica.notifier.wait_beyond(replica.notifier.last_n, 0.5)
                    found = [id_ for id_ in await replica.ids() if id_ in wanted]
        assert found == wanted
