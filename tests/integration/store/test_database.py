"""Opening databases: URLs, schemas, limits, and errors that say what to do."""

import asyncio
import contextlib
import os
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, inspect, select, text, update

from everstep.store import tables
from everstep.store.database import Database, StoreLimits, _use_wal, open_database, parse_url
from everstep.store.errors import (
    BadDatabaseUrlError,
    DatabaseDamagedError,
    DatabaseFullError,
    DatabaseLockedError,
    DatabaseUnavailableError,
    QueryTooLongError,
    SchemaTooNewError,
    StoreError,
)
from everstep.store.log import FactLog
from everstep.store.projected.registry import VERSION
from everstep.store.queries import log_head, stream_position
from everstep.store.schema import upgrade
from everstep_services.history.projections.fold import fold
from tests.waiting import turns, until_async


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite:///a.db", "sqlite+aiosqlite"),
        ("sqlite:////var/lib/a.db", "sqlite+aiosqlite"),
        ("postgresql://u@h/d", "postgresql+asyncpg"),
        ("postgres://u:p@h:5433/d", "postgresql+asyncpg"),
        ("postgresql+asyncpg://u@h/d?ssl=require", "postgresql+asyncpg"),
    ],
)
def test_a_url_gets_the_driver_that_we_use(url: str, driver: str) -> None:
    assert parse_url(url)[0].drivername == driver


@pytest.mark.parametrize(
    "url",
    [
        "",
        "history.db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite://a.db",
        "mysql://u:hunter2@h/d",
        "postgresql://u:hunter2@h",
        "postgresql+psycopg2://u:hunter2@h/d",
        "://u:hunter2@h",
    ],
)
def test_a_url_that_cannot_work_is_named_without_its_password(url: str) -> None:
    with pytest.raises(BadDatabaseUrlError, match="use sqlite:////") as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)


async def test_a_new_file_is_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.db"
    async with open_database(f"sqlite:///{path}") as database:
        await upgrade(database)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700


async def test_the_password_can_come_from_a_file(postgres_url: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter2\n")
    async with open_database(postgres_url, password_file=file) as database:
        await upgrade(database)
        assert "hunter2" not in database.place
    with pytest.raises(DatabaseUnavailableError, match="no password there"):
        async with open_database(postgres_url, password_file=tmp_path / "nowhere"):
            pass


async def test_the_schema_is_what_the_code_expects(database: Database) -> None:
    def differences(connection: Connection) -> list[Any]:
        kept = {table.name for table in tables.metadata.sorted_tables}
        context = MigrationContext.configure(
            connection,
            opts={
                "compare_type": True,
                "include_name": lambda name, kind, _: kind != "table" or name in kept,
            },
        )
        return list(compare_metadata(context, tables.metadata))

    async with database.read() as connection:
        assert await connection.run_sync(differences) == []


async def test_upgrading_again_changes_nothing(database: Database) -> None:
    before = await log_head(database)
    await upgrade(database)
    assert await log_head(database) == before


async def test_replicas_may_start_at_once(database_url: str) -> None:
    async def start() -> str:
        async with open_database(database_url) as database:
            await upgrade(database)
            return (await log_head(database)).epoch

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(start()) for _ in range(4)]
    assert len({task.result() for task in started}) == 1


async def test_a_new_file_that_another_process_has_alone_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.db"
    holder = await asyncio.to_thread(sqlite3.connect, path, check_same_thread=False)
    await asyncio.to_thread(holder.execute, "BEGIN EXCLUSIVE")
    begun: list[object] = []

    def use_wal(*given: Any) -> None:
        begun.append(given)
        _use_wal(*given)

    def impatient() -> None:
        with closing(sqlite3.connect(path, timeout=0.1)) as other:
            other.execute("PRAGMA journal_mode=WAL")

    async def start() -> str:
        async with open_database(f"sqlite:///{path}") as database:
            await upgrade(database)
            return (await log_head(database)).epoch

    monkeypatch.setattr("everstep.store.database._use_wal", use_wal)
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(start())
        await until_async(lambda: begun, "it has begun")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await asyncio.to_thread(impatient)
        assert not starting.done()
        await asyncio.to_thread(holder.rollback)
    await asyncio.to_thread(holder.close)
    assert starting.result()


class _Contended:
    """A file that two processes change to WAL at once: SQLite refuses one of them, unasked."""

    def __init__(self, refusals: int, said: str = "database is locked") -> None:
        self.refusals, self.said = refusals, said

    def execute(self, _: str) -> None:
        if self.refusals:
            self.refusals -= 1
            raise sqlite3.OperationalError(self.said)

    def run_async(self, _: object) -> None:
        """Would wait a moment."""


def test_the_change_of_a_new_file_is_tried_again_when_another_process_makes_it() -> None:
    contended = _Contended(refusals=3)
    _use_wal(contended, contended, within_s=60)
    assert contended.refusals == 0
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        _use_wal(contended, _Contended(refusals=10**9), within_s=0)
    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        _use_wal(contended, _Contended(1, "disk I/O error"), within_s=60)


async def test_every_database_has_an_epoch_of_its_own(tmp_path: Path) -> None:
    epochs = set()
    for name in ("a", "b"):
        async with open_database(f"sqlite:///{tmp_path / name}") as database:
            await upgrade(database)
            epochs.add((await log_head(database)).epoch)
    assert len(epochs) == 2


async def test_a_database_of_an_older_release_gets_what_it_lacks_and_keeps_its_facts(
    database: Database,
) -> None:
    """A11.2."""
    await FactLog(database, fold).append("s", [], sequence=7, received_us=1)
    async with database.write() as connection:
        await connection.execute(text("DROP INDEX ix_facts_job_kind_n"))
        await connection.execute(text("DROP TABLE kept_blobs"))
        await connection.execute(text("DROP TABLE removals"))
        await connection.execute(text("DROP TABLE login_codes"))
        await connection.execute(text("DROP TABLE maintenance"))
        await connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    await upgrade(database)
    await test_the_schema_is_what_the_code_expects(database)
    assert await stream_position(database) == ("s", 7)


async def test_a_schema_from_the_future_is_left_alone(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaTooNewError, match=r"schema 9999.*install the newer everstep"):
        await upgrade(database)


async def test_projections_from_the_future_are_left_alone(database: Database) -> None:
    log = FactLog(database, fold)
    async with database.write() as connection:
        await connection.execute(update(tables.meta).values(projection=VERSION + 1))
    with pytest.raises(SchemaTooNewError, match="projection"):
        await upgrade(database)
    with pytest.raises(SchemaTooNewError, match="projection"):
        await log.append("s", [], sequence=1, received_us=1)


async def test_older_projections_are_made_anew_empty(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(text("ALTER TABLE jobs ADD COLUMN of_old INTEGER"))
        await connection.execute(update(tables.meta).values(projection=0, projected_n=5, last_n=5))
    await upgrade(database)
    head = await log_head(database)
    assert (head.projected_n, head.last_n) == (0, 5)

    def columns(connection: Connection) -> set[str]:
        return {column["name"] for column in inspect(connection).get_columns("jobs")}

    async with database.read() as connection:
        assert await connection.run_sync(columns) == set(tables.jobs.columns.keys())


async def test_a_read_changes_nothing(database: Database) -> None:
    with pytest.raises(StoreError):
        async with database.read() as connection:
            await connection.execute(update(tables.meta).values(last_n=1))


async def test_a_read_sees_one_moment(database: Database) -> None:
    query = select(tables.meta.c.last_n)
    async with database.read() as connection:
        assert (await connection.execute(query)).scalar_one() == 0
        async with database.write() as writer:
            await writer.execute(update(tables.meta).values(last_n=5))
        assert (await connection.execute(query)).scalar_one() == 0
    assert (await log_head(database)).last_n == 5


async def test_a_write_that_waits_too_long_for_another_is_named(database_url: str) -> None:
    hasty = StoreLimits(lock_within_s=0.1)
    async with (
        open_database(database_url) as first,
        open_database(database_url, limits=hasty) as second,
    ):
        await upgrade(first)
        log = FactLog(second, fold)
        async with first.write() as connection:
            await connection.execute(select(tables.meta).with_for_update())
            with pytest.raises(DatabaseLockedError, match="end the long transaction"):
                await log.append("s", [], sequence=1, received_us=1)
        await log.append("s", [], sequence=1, received_us=1)


async def test_a_query_that_takes_too_long_is_stopped(database_url: str) -> None:
    endless = text(
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    )
    async with open_database(database_url, limits=StoreLimits(read_within_s=0.2)) as database:
        await upgrade(database)
        with pytest.raises(QueryTooLongError, match="narrow the filter"):
            async with database.read() as connection:
                await connection.execute(endless)
        head = await until_async(
            lambda: log_head(database), "the next one is answered", despite=QueryTooLongError
        )
        assert head.last_n == 0


async def test_a_cancelled_query_leaves_the_database_usable(database_url: str) -> None:
    endless = text(
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    )
    limits = StoreLimits(readers=1, read_within_s=3)
    async with open_database(database_url, limits=limits) as database:
        await upgrade(database)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), database.read() as connection:
                await connection.execute(endless)
        assert (await log_head(database)).last_n == 0


async def test_a_cancelled_write_frees_its_lock_though_its_error_is_kept(tmp_path: Path) -> None:
    """A log or a debugger may keep a traceback, and with it the cursor, as long as it likes."""
    url = f"sqlite:///{tmp_path / 'history.db'}"
    entered, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold() -> int:
        loop.call_soon_threadsafe(entered.set)
        release.wait()
        return 1

    async def write(database: Database) -> None:
        async with database.write() as connection:
            raw = await connection.get_raw_connection()
            assert raw.driver_connection is not None
            await raw.driver_connection.create_function("hold", 0, hold)
            await connection.execute(text("CREATE TABLE made (n)"))
            await connection.execute(text("SELECT hold() UNION ALL SELECT 2"))

    async with open_database(url) as database:
        writer = asyncio.create_task(write(database))
        await entered.wait()
        writer.cancel()
        loop.call_soon(release.set)
        with pytest.raises(asyncio.CancelledError) as kept:
            await writer
    async with (
        open_database(url, limits=StoreLimits(lock_within_s=0.1)) as database,
        database.write() as connection,
    ):
        await connection.execute(text("CREATE TABLE made (n)"))
    assert kept.value.__traceback__ is not None


async def test_a_cancellation_that_a_driver_loses_ends_the_task(database: Database) -> None:
    """As `asyncio.wait_for` loses it, if it comes together with the result."""

    async def read() -> None:
        async with database.read() as connection:
            await connection.execute(text("SELECT 1"))
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await turns()

    reader = asyncio.create_task(read())
    await asyncio.wait([reader])
    assert reader.cancelled()
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT 1"))).scalar() == 1


async def test_more_readers_than_connections_wait_and_are_then_named(database_url: str) -> None:
    limits = StoreLimits(readers=1, read_within_s=0.3)
    async with open_database(database_url, limits=limits) as database:
        await upgrade(database)
        async with database.read():
            with pytest.raises(DatabaseUnavailableError, match="connections are in use"):
                await log_head(database)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://postgres@127.0.0.1:1/nothing?ssl=disable",
        "postgresql://postgres@nowhere.invalid/nothing?ssl=disable",
        "postgresql://postgres@/nothing?host=/nowhere",
    ],
)
async def test_a_server_that_is_not_there_is_named(url: str) -> None:
    # Without TLS: asyncpg would look for certificates on the disk, on the loop.
    async with open_database(url) as database:
        with pytest.raises(DatabaseUnavailableError, match="cannot use postgresql:"):
            await upgrade(database)


async def test_a_database_that_is_not_there_is_named(postgres_url: str) -> None:
    async with open_database(postgres_url.replace("/t", "/absent", 1)) as database:
        with pytest.raises(DatabaseUnavailableError, match="does not exist"):
            await upgrade(database)


async def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    path.write_text("not a database, but long enough to be taken for the header of one" * 20)
    async with open_database(f"sqlite:///{path}") as database:
        with pytest.raises(DatabaseDamagedError, match="move it away"):
            await upgrade(database)


async def test_a_place_where_no_file_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseUnavailableError):
        async with open_database(f"sqlite:///{tmp_path / 'file' / 'history.db'}"):
            pass
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DatabaseUnavailableError, match="it is a FIFO, not a regular file"):
        async with open_database(f"sqlite:///{tmp_path / 'fifo'}"):
            pass


async def test_a_full_disk_is_named_and_nothing_is_half_written(sqlite_url: str) -> None:
    async with open_database(sqlite_url) as database:
        await upgrade(database)
        async with database.write() as connection:
            await connection.execute(text("PRAGMA max_page_count=1"))  # as small as it is now
        large = text("INSERT INTO positions VALUES ('s', 1, 1), (:text, 1, 1)")
        with pytest.raises(DatabaseFullError, match="free some space"):
            async with database.write() as connection:
                await connection.execute(large, {"text": "x" * 5_000_000})
        async with database.read() as connection:
            assert (await connection.execute(select(tables.positions))).all() == []


def test_errors_of_sqlite_have_the_names_that_we_look_for() -> None:
    with sqlite3.connect(":memory:") as connection:
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("SELECT * FROM nothing")
        assert caught.value.sqlite_errorname == "SQLITE_ERROR"
    connection.close()
