"""One SQL database, SQLite or PostgreSQL: opened, used within limits, its errors named."""

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, Connection, Engine, event, exc, make_url
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from everstep.evidence.files import check_regular, read_regular
from everstep.store.errors import (
    BadDatabaseUrlError,
    DatabaseAwayError,
    DatabaseDamagedError,
    DatabaseFullError,
    DatabaseLockedError,
    DatabaseUnavailableError,
    DriverMissingError,
    QueryTooLongError,
    StoreError,
    UnstorableError,
)

Kind = Literal["sqlite", "postgresql"]

_DRIVERS: Mapping[Kind, tuple[str, str]] = {
    "sqlite": ("sqlite+aiosqlite", "services"),
    "postgresql": ("postgresql+asyncpg", "postgres"),
}
_ATTRIBUTES = "target_session_attrs"
_PROGRESS_EVERY_OPS = 20_000
_LONGEST_ROW_BYTES = 64 << 20
"""Twice the largest piece of evidence; a fact is much smaller."""
WARY = ("trusted_schema=OFF", f"hard_heap_limit={1 << 30}")
"""Pragmas for a file from elsewhere; the second is for all of SQLite in this process."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much of the database one process may use, and for how long."""

    readers: int = 4
    connect_within_s: float = 5.0
    read_within_s: float = 5.0
    write_within_s: float = 60.0
    lock_within_s: float = 10.0


class Database:
    """Made by `open_database`. Reads see one moment each; writes happen one after another."""

    def __init__(self, url: URL, kind: Kind, limits: StoreLimits) -> None:
        self.kind: Kind = kind
        self.place = url.render_as_string(hide_password=True).replace(f"{url.drivername}:", "")
        self.place = f"{kind}:{self.place}"
        self.limits = limits
        self._writer = _engine(url, kind, limits, for_reading=False)
        self._reader = _engine(url, kind, limits, for_reading=True)

    @property
    def dialect(self) -> Dialect:
        """The SQL dialect of this database."""
        return self._writer.dialect

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction that sees one moment and changes nothing, for `read_within_s`."""
        async with self._transaction(self._reader, self.limits.read_within_s) as connection:
            yield connection

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[AsyncConnection]:
        """A transaction that is committed at the end of the block, or leaves nothing."""
        async with self._transaction(self._writer, self.limits.write_within_s) as connection:
            yield connection

    async def close(self) -> None:
        """Close every connection."""
        await self._reader.dispose()
        await self._writer.dispose()

    @asynccontextmanager
    async def _transaction(
        self, engine: AsyncEngine, within_s: float
    ) -> AsyncGenerator[AsyncConnection]:
        with _cancelled_if_asked(), named_errors(self.place):
            # Longer than the database's own limit, which says more precisely what was slow.
            async with asyncio.timeout(within_s + self.limits.connect_within_s + 1):
                async with engine.begin() as connection:
                    yield connection


@contextlib.contextmanager
def _cancelled_if_asked() -> Generator[None]:
    """End the task that was cancelled meanwhile, though somebody below has lost that.

    The queue of connections and the drivers use `asyncio.wait_for`, which until Python 3.12 drops
    a cancellation that comes together with the result: the caller's loop would never end.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001  a broken transaction may hide the cancellation
        error = caught
    if task and task.cancelling() > before:
        raise asyncio.CancelledError from error
    if error is not None:
        raise error


@asynccontextmanager
async def open_database(
    url: str, *, password_file: Path | None = None, limits: StoreLimits | None = None
) -> AsyncGenerator[Database]:
    """The database at `sqlite:///path` or `postgresql://user@host/name`, not yet connected.

    The password is better kept in a file than in the URL. A missing SQLite file is made,
    readable by this user only.
    """
    parsed, kind = parse_url(url)
    if password_file is not None:
        parsed = parsed.set(password=await asyncio.to_thread(_read_password, password_file))
    if kind == "sqlite":
        await asyncio.to_thread(_make_file, parsed)
    try:
        # In a thread: it imports the driver, and asks the disk where a relative path leads.
        database = await asyncio.to_thread(Database, parsed, kind, limits or StoreLimits())
    except ModuleNotFoundError as error:
        raise DriverMissingError(kind, _DRIVERS[kind][1]) from error
    try:
        yield database
    finally:
        await database.close()


def parse_url(url: str) -> tuple[URL, Kind]:
    """The URL with the driver that we use, and the kind of database it names."""
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError) as error:
        raise BadDatabaseUrlError(_without_password(url), "it cannot be parsed") from error
    shown = parsed.render_as_string(hide_password=True)
    match parsed.drivername:
        case "sqlite" | "sqlite+aiosqlite":
            kind: Kind = "sqlite"
            if parsed.database in {None, "", ":memory:"} or parsed.host:
                raise BadDatabaseUrlError(shown, "it needs a file, sqlite:///PATH")
        case "postgresql" | "postgres" | "postgresql+asyncpg":
            kind = "postgresql"
            if not parsed.database:
                raise BadDatabaseUrlError(shown, "it names no database")
        case other:
            raise BadDatabaseUrlError(shown, f"{other!r} is not supported")
    return parsed.set(drivername=_DRIVERS[kind][0]), kind


def _engine(url: URL, kind: Kind, limits: StoreLimits, *, for_reading: bool) -> AsyncEngine:
    within_s = limits.read_within_s if for_reading else limits.write_within_s
    options: dict[str, Any] = {
        "poolclass": AsyncAdaptedQueuePool,
        "pool_size": limits.readers if for_reading else 1,
        "max_overflow": 0 if for_reading else 1,
        "pool_timeout": within_s,
        "hide_parameters": True,  # facts may hold what a log must not
    }
    if kind == "postgresql":
        if for_reading and url.query.get(_ATTRIBUTES) == "read-write":
            # Only our own reading connections refuse to write, not the server.
            url = url.update_query_dict({_ATTRIBUTES: "primary"})
        return create_async_engine(
            url,
            pool_pre_ping=True,
            pool_recycle=1800,
            isolation_level="REPEATABLE READ" if for_reading else "READ COMMITTED",
            connect_args=_postgres_arguments(limits, within_s, for_reading=for_reading),
            **options,
        )
    # The driver must not begin transactions by itself: see `begin_within`.
    arguments = {
        "isolation_level": None,
        "timeout": limits.lock_within_s,
        "factory": TamedConnection,
    }
    engine = create_async_engine(url, connect_args=arguments, **options)
    _tame_sqlite(engine.sync_engine, limits, for_reading=for_reading)
    return engine


def _postgres_arguments(
    limits: StoreLimits, within_s: float, *, for_reading: bool
) -> dict[str, Any]:
    return {
        "timeout": limits.connect_within_s,
        "server_settings": {
            "application_name": "everstep-history",
            "statement_timeout": str(int(within_s * 1000)),
            "lock_timeout": str(int(limits.lock_within_s * 1000)),
            "idle_in_transaction_session_timeout": str(int(limits.write_within_s * 1000)),
            "default_transaction_read_only": "on" if for_reading else "off",
            "timezone": "UTC",
        },
    }


class TamedConnection(sqlite3.Connection):
    """A connection whose transaction ends when it is closed, and whose rows are of bounded size.

    SQLite keeps a closed connection, and its lock, until the last cursor is collected. After a
    cancelled write a traceback may hold one for as long as the process lives.

    A file from elsewhere may have values that fill the memory: one that is too long is an error.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_ROW_BYTES)

    def close(self) -> None:
        """Roll back what was not committed, and close."""
        with contextlib.suppress(sqlite3.Error):  # closed already, or the disk has failed
            self.rollback()
        super().close()


def _use_wal(connection: Any, cursor: Any, within_s: float) -> None:
    """Let readers and the writer not wait for each other.

    The first change of a new file needs it alone, and SQLite's busy_timeout does not cover
    that: processes that start together must try again.
    """
    until = time.monotonic() + within_s
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            connection.run_async(lambda _: asyncio.sleep(0.01))
        else:
            return


def _tame_sqlite(engine: Engine, limits: StoreLimits, *, for_reading: bool) -> None:
    within_s = limits.read_within_s if for_reading else limits.write_within_s

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, record: Any) -> None:
        del record
        cursor = connection.cursor()
        _use_wal(connection, cursor, limits.lock_within_s)
        for pragma in (
            "synchronous=NORMAL",  # a power cut may take the newest: the stream has them still
            "foreign_keys=ON",
            f"busy_timeout={int(limits.lock_within_s * 1000)}",
            "cache_size=-32768",
            "temp_store=MEMORY",
            "trusted_schema=OFF",  # it may be the database of a bundle
            "wal_autocheckpoint=8000",  # pages: copying them back less often is cheaper
            f"query_only={'ON' if for_reading else 'OFF'}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    # A writer takes its lock at once: one that began by reading could not wait for it.
    begin_within(engine, within_s, "BEGIN" if for_reading else "BEGIN IMMEDIATE")


def begin_within(engine: Engine, within_s: float, begin: str) -> None:
    """Begin SQLite's transactions so, and end what takes longer; the driver begins none itself."""

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, record: Any) -> None:
        deadline = record.info["deadline"] = [float("inf")]
        connection.run_async(
            lambda driver: driver.set_progress_handler(
                lambda: time.monotonic() > deadline[0], _PROGRESS_EVERY_OPS
            )
        )

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.info["deadline"][0] = time.monotonic() + within_s
        connection.exec_driver_sql(begin)


def _make_file(url: URL) -> None:
    path = Path(str(url.database))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "rb"):
            check_regular(descriptor, path)
    except OSError as error:
        place = f"sqlite:///{path}"
        raise DatabaseUnavailableError(place, error.strerror or str(error)) from error


def _read_password(path: Path) -> str:
    try:
        return read_regular(path).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DatabaseUnavailableError(str(path), f"no password there: {error}") from error


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else scheme


_PLAIN: Mapping[str, Callable[[str], StoreError]] = {
    "SQLITE_FULL": DatabaseFullError,
    "SQLITE_BUSY": DatabaseLockedError,
    "SQLITE_LOCKED": DatabaseLockedError,
    "SQLITE_INTERRUPT": QueryTooLongError,
    "53100": DatabaseFullError,
    "55P03": DatabaseLockedError,
    "57014": QueryTooLongError,
}
_EXPLAINED: Mapping[str, Callable[[str, str], StoreError]] = {
    "SQLITE_CORRUPT": DatabaseDamagedError,
    "SQLITE_NOTADB": DatabaseDamagedError,
    "SQLITE_CANTOPEN": DatabaseUnavailableError,
    "SQLITE_READONLY": DatabaseUnavailableError,
    "SQLITE_IOERR": DatabaseUnavailableError,
    "SQLITE_PERM": DatabaseUnavailableError,
    "SQLITE_TOOBIG": UnstorableError,
    # PostgreSQL's classes of states that pass with time, or that a person can repair
    "08": DatabaseUnavailableError,
    "25006": DatabaseUnavailableError,
    "28": DatabaseUnavailableError,
    "3D": DatabaseUnavailableError,
    "40": DatabaseUnavailableError,
    "42501": DatabaseUnavailableError,
    "53": DatabaseUnavailableError,
    "55": DatabaseUnavailableError,
    "57": DatabaseUnavailableError,
    "57P03": DatabaseAwayError,
    "58": DatabaseUnavailableError,
    "XX": DatabaseDamagedError,
    "22": UnstorableError,
    "54": UnstorableError,
}
"""By the beginning of SQLite's error name, or of PostgreSQL's state."""


_NO_PRIMARY = "None of the hosts match"
"""What asyncpg says when all servers are standbys."""


@contextmanager
def named_errors(place: str) -> Generator[None]:
    """Turn what the drivers raise into a `StoreError`; mistakes in our SQL stay as they are."""
    try:
        yield
    except TimeoutError as error:
        raise DatabaseAwayError(place, "no answer in time") from error
    except (OverflowError, MemoryError) as error:
        raise UnstorableError(place, str(error) or "it needs too much memory") from error
    except (exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
        named = _named(error, place)
        if named is None:
            raise
        raise named from error
    except Exception as error:
        # While connecting, asyncpg's own errors arrive unwrapped; they all have a state.
        named = _by_code(error, place) if hasattr(error, "sqlstate") else None
        if named is None:
            raise
        raise named from error


def _named(error: Exception, place: str) -> StoreError | None:
    cause: BaseException = error
    if isinstance(error, exc.DBAPIError) and error.orig is not None:
        cause = error.orig
    named = _by_code(cause, place)
    if named is not None:
        return named
    if isinstance(error, exc.TimeoutError):
        return DatabaseUnavailableError(place, "all its connections are in use")
    if isinstance(cause, OSError) or _NO_PRIMARY in str(cause):
        return DatabaseAwayError(place, _why_away(cause))
    lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
    if lost or isinstance(error, exc.InterfaceError):
        return DatabaseUnavailableError(place, _first_line(cause))
    # asyncpg checks arguments itself, before the server could give a state.
    if isinstance(error, exc.DataError) or "DataError" in type(cause).__name__:
        return UnstorableError(place, _first_line(cause))
    return None


def _why_away(cause: BaseException) -> str:
    if isinstance(cause, OSError):
        return cause.strerror or str(cause) or "no connection"
    return "none of its servers takes writes, promote the standby"


def _by_code(error: BaseException, place: str) -> StoreError | None:
    code = getattr(error, "sqlite_errorname", None) or getattr(error, "sqlstate", None) or ""
    for length in range(len(code), 1, -1):
        if plain := _PLAIN.get(code[:length]):
            return plain(place)
        if explained := _EXPLAINED.get(code[:length]):
            return explained(place, _first_line(error))
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
