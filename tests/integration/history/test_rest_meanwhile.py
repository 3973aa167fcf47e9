"""REST while something else happens: uses that cannot be written, changes between two reads."""

import dataclasses
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from everstep.messages import RankExited, RoundEnded
from everstep.store.database import Database, StoreLimits, open_database
from everstep.store.schema import upgrade
from everstep.store.times import to_us
from everstep.store.tokens import StoredToken, Tokens
from everstep_services.history.api.app import create_app
from everstep_services.history.api.http.auth import TokenAuth
from everstep_services.history.api.http.problems import ProblemError
from everstep_services.history.settings import ApiSettings
from tests.fakes.clock import FakeClock
from tests.integration.conftest import Api
from tests.integration.history.test_rest_incidents import LOG, problem
from tests.unit.history.story import begun, killed


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite only: both kinds read one moment in a transaction."""
    return sqlite_url


async def test_uses_that_cannot_be_written_wait_and_end_nothing(
    sqlite_url: str, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_database(sqlite_url, limits=StoreLimits(lock_within_s=0.01)) as database:
        await upgrade(database)
        tokens = Tokens(database)
        auth = TokenAuth(ApiSettings(), tokens, clock)
        token, text = await tokens.make("dash", "read", now_us=0)
        await auth.admit(f"Bearer {text}", "here")
        other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            await auth.write_used()
        other.close()
        assert caplog.text.count("token_uses_not_written") == 1
        await auth.write_used()
        first = await tokens.by_id(token.id)
        assert first is not None
        assert first.last_used_us == to_us(clock.wall())


async def test_a_use_while_another_is_written_is_written_next(
    database: Database, clock: FakeClock
) -> None:
    class Used(Tokens):
        async def note_used(self, last_used_us: Mapping[str, int]) -> None:
            await super().note_used(last_used_us)
            await clock.advance(7)
            await auth.admit(f"Bearer {text}", "here")

    auth = TokenAuth(ApiSettings(), Used(database), clock)
    token, text = await Tokens(database).make("dash", "read", now_us=0)
    await auth.admit(f"Bearer {text}", "here")
    for _ in range(2):
        used_us = to_us(clock.wall())
        await auth.write_used()
        noted = await Tokens(database).by_id(token.id)
        assert noted is not None
        assert noted.last_used_us == used_us


async def test_a_token_that_is_revoked_while_it_is_looked_up_is_not_remembered(
    database: Database, clock: FakeClock
) -> None:
    class Revoked(Tokens):
        async def stored(self, ids: Collection[str]) -> Mapping[str, StoredToken]:
            found = await super().stored(ids)
            await self.revoke(token.id, now_us=1)
            auth.forget(token.id)
            return found

    auth = TokenAuth(ApiSettings(), Revoked(database), clock)
    token, text = await Tokens(database).make("dash", "read", now_us=0)
    await auth.admit(f"Bearer {text}", "here")  # it was good when it was looked up
    with pytest.raises(ProblemError, match="revoked"):
        await auth.admit(f"Bearer {text}", "here")


class Busy(Database):
    """As another one, where something happens after each read."""

    def __init__(self, database: Database, then: Callable[[], Awaitable[None]]) -> None:
        self.__dict__.update(database.__dict__)
        self._then = then

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncConnection]:
        async with super().read() as connection:
            yield connection
        await self._then()


async def test_a_rank_that_fails_while_its_log_is_looked_for_is_not_said_to_have_been_well(
    api: Api,
) -> None:
    await api.add(*begun())
    failure = [fact for fact in killed() if isinstance(fact, RankExited | RoundEnded)]

    async def fail() -> None:
        await api.add(*failure)
        failure.clear()

    api.app = create_app(dataclasses.replace(api.context, database=Busy(api.database, fail)))
    async with api.client(await api.token()) as client:
        assert "has not ended" in (await problem(client, LOG))[2]
        assert not failure
        assert (await problem(client, LOG))[:2] == (410, "log_gone")
