"""The database file of history, read without a service and without changing anything."""

import asyncio
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from alembic.util import CommandError
from sqlalchemy import URL, Engine, event, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from everstep.store import tables
from everstep.store.database import WARY, Database, StoreLimits, TamedConnection, begin_within
from everstep.store.errors import (
    DatabaseDamagedError,
    DatabaseUnavailableError,
    ReadOnlyError,
    SchemaTooNewError,
    SchemaTooOldError,
)
from everstep.store.projected.registry import VERSION
from everstep.store.schema import current_revision, head, known_revisions

_BESIDE = ("wal", "shm", "journal")
"""Files of SQLite next to the database."""


class RecordFile(Database):
    """A `Database` that cannot write, create a file or block the writer.

    Where a writer is at work, or was killed, SQLite's log lies next to the file and is read with
    it. Where there is none, the file is complete and is opened as immutable: SQLite would
    otherwise create its log again.
    """

    def __init__(self, path: Path, limits: StoreLimits | None = None) -> None:
        self.kind = "sqlite"
        self.path = path
        self.place = f"the record in {path}"
        self.limits = limits or StoreLimits(readers=1)
        for file in (path, *(path.with_name(f"{path.name}-{end}") for end in _BESIDE)):
            if file.exists() and not file.is_file():  # SQLite would wait for a FIFO for ever
                raise DatabaseUnavailableError(self.place, f"{file} is not a regular file")
        self.is_immutable = not has_log(path)
        self._reader = _engine(path, self.limits, is_immutable=self.is_immutable)
        self._writer = self._reader

    def write(self) -> NoReturn:
        """Refuse: nothing is ever written here."""
        raise ReadOnlyError(self.place)

    async def close(self) -> None:
        """Close the connection."""
        await self._reader.dispose()

    async def check(self) -> None:
        """Raise the `StoreError` that says why this version cannot read the file."""
        newest, revisions = await asyncio.to_thread(lambda: (head(), known_revisions()))
        async with self.read() as connection:
            try:
                revision = await connection.run_sync(current_revision)
            except CommandError as error:
                raise DatabaseDamagedError(self.place, str(error)[:200]) from error
            if revision is None:
                raise DatabaseUnavailableError(self.place, "nothing was ever recorded in it")
            if revision not in revisions:
                raise SchemaTooNewError(self.place, revision, newest)
            projection = (await connection.execute(select(tables.meta.c.projection))).scalar_one()
        if projection > VERSION:
            raise SchemaTooNewError(self.place, f"projection {projection}", f"projection {VERSION}")
        if revision != newest or projection < VERSION:
            raise SchemaTooOldError(self.place)


def has_log(path: Path) -> bool:
    """Whether SQLite's write-ahead log lies next to the file."""
    return path.with_name(f"{path.name}-wal").exists()


def _engine(path: Path, limits: StoreLimits, *, is_immutable: bool) -> AsyncEngine:
    mode = {"immutable": "1"} if is_immutable else {"mode": "ro"}
    url = URL.create(
        "sqlite+aiosqlite", database=f"file:{quote(str(path))}", query={**mode, "uri": "true"}
    )
    engine = create_async_engine(
        url,
        connect_args={
            "isolation_level": None,
            "timeout": limits.lock_within_s,
            "factory": TamedConnection,
        },
        poolclass=AsyncAdaptedQueuePool,
        pool_size=limits.readers,
        max_overflow=0,
        hide_parameters=True,
    )
    _restrict(engine.sync_engine)
    begin_within(engine.sync_engine, limits.read_within_s, "BEGIN")
    return engine


def _restrict(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _connect(connection: object, _: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]
        for pragma in ("query_only=ON", "temp_store=MEMORY", *WARY):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()
