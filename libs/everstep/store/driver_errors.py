"""Turns the errors of the drivers into errors that say what to do."""

import sqlite3
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from sqlalchemy import exc

from everstep.store.errors import (
    DatabaseDamagedError,
    DatabaseFullError,
    DatabaseLockedError,
    DatabaseUnavailableError,
    QueryTooLongError,
    StoreError,
    UnstorableError,
)

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
    "58": DatabaseUnavailableError,
    "XX": DatabaseDamagedError,
    "22": UnstorableError,
    "54": UnstorableError,
}
"""By the beginning of SQLite's error name, or of PostgreSQL's state."""


@contextmanager
def named_errors(place: str) -> Generator[None]:
    """Turn what the drivers raise into a `StoreError`; mistakes in our SQL stay as they are."""
    try:
        yield
    except TimeoutError as error:
        raise DatabaseUnavailableError(place, "no answer in time") from error
    except OverflowError as error:
        raise UnstorableError(place, str(error)) from error
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
    if isinstance(cause, OSError):
        return DatabaseUnavailableError(place, cause.strerror or str(cause) or "no connection")
    lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
    if lost or isinstance(error, exc.InterfaceError):
        return DatabaseUnavailableError(place, _first_line(cause))
    # asyncpg checks arguments itself, before the server could give a state.
    if isinstance(error, exc.DataError) or "DataError" in type(cause).__name__:
        return UnstorableError(place, _first_line(cause))
    return None


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
