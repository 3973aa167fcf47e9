"""The log and its projections in real databases: once, in order, whatever is repeated."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select

from everstep.messages import Fact
from everstep.store import tables
from everstep.store.database import Database
from everstep.store.errors import UnstorableError
from everstep.store.log import FactLog, NewFact
from everstep.store.projected.changes import Changes, LoggedFact, Value
from everstep.store.projected.jobs import JOBS
from everstep.store.projected.registry import PROJECTED
from everstep.store.queries import log_head, stream_position
from everstep_services.history.fact_decoder import decode_batch
from everstep_services.history.projections.fold import fold
from tests.unit.history.facts import delivered, facts, make
from tests.unit.history.test_projections import partitioned, tables_of

Rows = dict[str, dict[tuple[Any, ...], dict[str, Value]]]


@pytest.fixture
def log(fact_log: FactLog) -> FactLog:
    return fact_log


def new(given_facts: Iterable[Fact], first_sequence: int = 1) -> list[NewFact]:
    sent = [delivered(fact, i) for i, fact in enumerate(given_facts, first_sequence)]
    return decode_batch(sent).facts


async def append(log: FactLog, *given_facts: Fact, stream: str = "s", sequence: int = 9) -> None:
    await log.append(stream, new(given_facts), sequence=sequence, received_us=7)


async def projected(database: Database) -> Rows:
    """Every projected row, without what was never set."""
    found: Rows = {}
    async with database.read() as connection:
        for shape, table in tables.projected.items():
            found[shape.name] = {}
            for row in (await connection.execute(select(table))).mappings():
                key = tuple(row[name] for name in shape.key)
                found[shape.name][key] = {
                    name: row[name] for name in shape.columns if row[name] is not None
                }
    return found


def set_only(wanted: Rows) -> Rows:
    def clean(value: Value) -> Value:
        return value.replace("\x00", "\ufffd") if isinstance(value, str) else value

    return {
        shape.name: {
            key: {name: clean(v) for name, v in values.items() if v is not None}
            for key, values in wanted[shape.name].items()
        }
        for shape in PROJECTED
    }


async def empty(database: Database) -> None:
    async with database.write() as connection:
        for table in (tables.facts, tables.positions, *tables.projected.values()):
            await connection.execute(delete(table))
        await connection.execute(tables.meta.update().values(last_n=0, projected_n=0))


async def logged_ids(database: Database) -> list[str]:
    async with database.read() as connection:
        query = select(tables.facts.c.id).order_by(tables.facts.c.n)
        return list((await connection.execute(query)).scalars())


@given(
    st.lists(facts(), max_size=12),
    st.lists(st.integers(0, 100), max_size=3),
    st.lists(st.integers(0, 100), max_size=4),
)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_the_database_merges_as_the_rules_say_however_often_facts_come(
    database: Database, log: FactLog, given_facts: list[Fact], cuts: list[int], again: list[int]
) -> None:
    await empty(database)
    for batch in partitioned(given_facts, cuts):
        repeated = [given_facts[i % len(given_facts)] for i in again if given_facts]
        seen = set(await logged_ids(database))
        await append(log, *batch, *batch, *(f for f in repeated if f.id in seen))
    assert await projected(database) == set_only(tables_of([[f] for f in given_facts]))


async def test_a_batch_is_logged_in_order_with_its_position(
    database: Database, log: FactLog
) -> None:
    sent = [make("rank_exited", rank=rank, how="error") for rank in range(5)]
    appended = await log.append("s1", new(sent), sequence=12, received_us=7)

    assert (appended.last_n, appended.added, appended.duplicates) == (5, 5, 0)
    assert await logged_ids(database) == [fact.id for fact in sent]
    assert await stream_position(database) == ("s1", 12)


async def test_what_fails_in_the_transaction_leaves_neither_facts_nor_position(
    database: Database, log: FactLog
) -> None:
    await append(log, make("job_started"), sequence=1)
    before = (await projected(database), await log_head(database))

    class CrashError(BaseException):
        pass

    def crash(recorded: Iterable[LoggedFact]) -> Changes:
        for _ in recorded:
            raise CrashError
        return Changes()

    lost = make("round_ended")
    with pytest.raises(CrashError):
        await append(FactLog(database, crash), lost, sequence=2)
    assert (await projected(database), await log_head(database)) == before
    assert await stream_position(database) == ("s", 1)

    await append(log, lost, sequence=2)
    assert (await log_head(database)).last_n == 2


async def test_a_stream_that_was_wiped_and_filled_again_adds_only_what_is_new(
    database: Database, log: FactLog
) -> None:
    old = [make("rank_exited", rank=rank, how="error") for rank in range(3)]
    await append(log, *old, stream="first", sequence=3)
    fresh = make("round_ended")
    await append(log, old[2], fresh, stream="second", sequence=2)

    assert await logged_ids(database) == [*(fact.id for fact in old), fresh.id]
    assert (await projected(database))["jobs"]["j",]["ranks_failed"] == 3


async def test_a_rebuild_gives_the_same_tables(database: Database, log: FactLog) -> None:
    for kind in ("job_started", "round_formed", "rank_exited", "node_joined", "round_ended"):
        await append(log, *(make(kind, round=n, job=f"j{n}") for n in (1, 2, 3)))
    original = await projected(database)

    assert await log.start_rebuild() == 15
    assert (await projected(database))["jobs"] == {}
    remaining = [await log.catch_up(most=4) for _ in range(4)]

    assert remaining == [11, 7, 3, 0]
    assert await projected(database) == original


async def test_facts_that_arrive_during_a_rebuild_wait_for_their_turn(
    database: Database, log: FactLog
) -> None:
    await append(log, make("job_started"), make("round_started", round=1))
    await log.start_rebuild()
    late = new([make("round_ended", round=1)])
    appended = await log.append("s", late, sequence=3, received_us=7)
    assert not appended.is_projected

    while await log.catch_up(most=1):
        pass
    assert (await projected(database))["rounds"]["j", 1]["phase_order"] == 4
    assert (await log.append("s", [], sequence=4, received_us=7)).is_projected


async def test_a_kind_from_the_future_is_kept_as_it_is(database: Database, log: FactLog) -> None:
    """An older history keeps the bytes (A15.3)."""
    known = make("rank_exited")
    message = delivered(known, 1)
    future = message.data.replace(b"rank_exited.v1", b"rank_evaporated.v7")
    batch = decode_batch([type(message)(1, "es.fact.j.rank_evaporated", future)])
    await log.append("s", batch.facts, sequence=1, received_us=7)

    async with database.read() as connection:
        row = (await connection.execute(select(tables.facts))).mappings().one()
    assert (row["kind"], row["body"]) == ("rank_evaporated", future.decode())
    assert (await projected(database))["jobs"] == {}


async def test_a_number_that_no_database_holds_is_named(database: Database, log: FactLog) -> None:
    def too_much(_: Iterable[LoggedFact]) -> Changes:
        changes = Changes()
        changes.merge(JOBS, ("j",), restarts=2**70)
        return changes

    with pytest.raises(UnstorableError):
        await append(FactLog(database, too_much), make("round_started", round=1))
    assert (await log_head(database)).last_n == 0


async def test_two_writers_on_one_database_lose_and_repeat_nothing(
    database: Database, log: FactLog
) -> None:
    sent = [make("rank_exited", rank=rank, how="error") for rank in range(60)]

    async def write_all(size: int) -> None:
        mine = FactLog(database, fold)
        for begin in range(0, len(sent), size):
            await append(mine, *sent[begin : begin + size], sequence=begin + size)

    async with asyncio.TaskGroup() as group:
        group.create_task(write_all(7))
        group.create_task(write_all(10))
    assert sorted(await logged_ids(database)) == sorted(fact.id for fact in sent)
    assert (await projected(database))["jobs"]["j",]["ranks_failed"] == 60


async def test_large_facts_are_projected_a_few_at_a_time(database: Database, log: FactLog) -> None:
    sent: Sequence[Fact] = [make("rank_exited", first_error="x" * 900_000) for _ in range(30)]
    for fact in sent:
        await append(log, fact)
    await log.start_rebuild()
    assert 0 < await log.catch_up() < 30
    while await log.catch_up():
        pass
    assert len((await projected(database))["rank_exits"]) == 30


async def test_tables_hold_of_long_texts_what_a_page_can_show(
    database: Database, log: FactLog
) -> None:
    long = make("round_ended", round=1, reason="x" * 500_000)
    started = make("job_started")
    spec = msgspec.structs.replace(started.spec, command=("y" * 100_000,))  # type: ignore[attr-defined]
    await append(log, long, msgspec.structs.replace(started, spec=spec))
    tables_now = await projected(database)
    assert tables_now["rounds"]["j", 1]["end_reason"] == "x" * 8192
    assert "command" not in tables_now["jobs"]["j",]
    assert tables_now["jobs"]["j",]["labels"] == '{"team":"vision"}'
