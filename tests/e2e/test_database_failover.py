"""PostgreSQL's primary is killed, and its standby promoted: that is the database from then on."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.store.database import open_database
from everstep.store.errors import DatabaseAwayError
from tests.e2e.postgres import Postgres


@pytest.fixture
def pair() -> Iterator[tuple[Postgres, Postgres]]:
    """A primary, and a standby that follows it."""
    # Not below pytest's own folder: see the fixture `postgres`.
    primary = Postgres(Path(tempfile.mkdtemp(prefix="everstep-pg-")))
    try:
        standby = primary.standby(Path(tempfile.mkdtemp(prefix="everstep-pg-")))
        try:
            yield primary, standby
        finally:
            standby.stop()
    finally:
        primary.stop()


def url(*servers: Postgres) -> str:
    hosts = "&".join(f"host={server.socket}:5432" for server in servers)
    return f"postgresql://postgres@/postgres?{hosts}&target_session_attrs=read-write"


@pytest.mark.chaos
async def test_the_promoted_standby_is_written_and_read(pair: tuple[Postgres, Postgres]) -> None:
    """Connections that only read refuse to write, and are no standby for that."""
    primary, standby = pair
    async with open_database(url(primary, standby)) as database:
        for transaction in (database.write, database.read):
            async with transaction() as connection:
                await connection.exec_driver_sql("SELECT 1")
        await asyncio.to_thread(primary.kill)
        async with open_database(url(standby, standby)) as followers:
            with pytest.raises(DatabaseAwayError, match="promote the standby"):
                async with followers.write():
                    pass
        await asyncio.to_thread(standby.promote)
        for transaction in (database.write, database.read):
            async with transaction() as connection:
                found = await connection.exec_driver_sql("SELECT pg_is_in_recovery()")
                assert found.scalar() is False
