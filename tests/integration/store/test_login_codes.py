"""Codes for one login, on both databases."""

import asyncio

from sqlalchemy import func, select

from everstep.store import tables
from everstep.store.database import Database
from everstep.store.login_codes import LoginCodes
from tests.fakes.clock import FakeClock


async def test_a_code_is_valid_once_at_any_replica(database: Database) -> None:
    """A13.1: of many that take it at once, one gets the token."""
    clock = FakeClock()
    made, others = LoginCodes(database, clock), LoginCodes(database, clock)
    code = await made.make("evs_a")
    taken = await asyncio.gather(*(others.take(code) for _ in range(8)))
    assert sorted(taken, key=str) == [*[None] * 7, "evs_a"]
    assert await made.take(code) is None


async def test_a_code_is_forgotten_after_a_minute(database: Database) -> None:
    clock = FakeClock()
    codes = LoginCodes(database, clock)
    late, early = await codes.make("evs_a"), await codes.make("evs_b")
    await clock.advance(59)
    assert await codes.take(early) == "evs_b"
    await clock.advance(2)
    assert await codes.take(late) is None
    await codes.make("evs_c")
    async with database.read() as connection:
        count = select(func.count()).select_from(tables.login_codes)
        assert (await connection.execute(count)).scalar_one() == 1


async def test_the_database_has_neither_codes_nor_tokens(database: Database) -> None:
    """A13.5: a reader of a backup can log in with nothing of it."""
    code = await LoginCodes(database, FakeClock()).make("evs_0123_secret")
    async with database.read() as connection:
        (row,) = (await connection.execute(select(tables.login_codes))).all()
    stored = repr(tuple(row))
    assert code not in stored
    assert "secret" not in stored
    assert b"secret" not in row.sealed
