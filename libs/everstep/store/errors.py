"""Errors of the database, each with its remedy."""

from everstep.errors import EverstepError


class StoreError(EverstepError):
    """The database did not do what it was asked; `remedy` is part of the text."""


class BadDatabaseUrlError(StoreError):
    """The URL names no database that we can use."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"{url!r} is not a database URL: {reason}; "
            f"use sqlite:////var/lib/everstep/history.db or postgresql://user@host/database"
        )


class DriverMissingError(StoreError):
    """The package that speaks to this kind of database is not installed."""

    def __init__(self, kind: str, extra: str) -> None:
        super().__init__(f"no driver for {kind}: run `pip install 'everstep[{extra}]'`")


class DatabaseUnavailableError(StoreError):
    """The database cannot be reached, or does not answer. Trying again later may help."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(
            f"cannot use {place}: {reason}; "
            f"check that it exists, runs, and lets this user in; facts wait in the stream"
        )


class DatabaseAwayError(DatabaseUnavailableError):
    """Nothing answers there, or a server that is still starting: it may come by itself."""


class DatabaseFullError(StoreError):
    """There is no room left for the database."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place} is full: free some space; facts wait in the stream")


class DatabaseLockedError(StoreError):
    """Another process held the database for too long."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place} is locked by another process: end the long transaction, or the backup"
        )


class DatabaseDamagedError(StoreError):
    """The file is not a database, or is damaged."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(
            f"{place} is damaged: {reason}; move it away and start again: "
            f"everything is read from the stream once more"
        )


class QueryTooLongError(StoreError):
    """A read took longer than a read may."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place}: the query took too long and was stopped; narrow the filter")


class SchemaTooNewError(StoreError):
    """A newer Everstep has already migrated this database."""

    def __init__(self, place: str, schema: str, newest: str) -> None:
        super().__init__(
            f"{place} has schema {schema}, this version knows only {newest}: "
            f"install the newer everstep, or use another database"
        )
        self.schema = schema


class SchemaTooOldError(StoreError):
    """An older Everstep has written this file, and only a writer can bring it up to date."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place} was written by an older version: `everstep up` on its state directory "
            f"brings it up to date"
        )


class ReadOnlyError(StoreError):
    """The database was opened for reading only."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place} is only read here")


class UnstorableError(StoreError):
    """The database refuses a value, whenever it is tried: a number or text out of its range."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place} cannot hold a value: {reason}")
