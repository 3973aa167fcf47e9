"""Counts the queries that a database answers, so that tests need no clock to say what is slow."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from everstep.store.database import Database


@contextmanager
def counted(database: Database) -> Iterator[list[str]]:
    """The statements that readers run meanwhile, without those that begin or end something."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: object) -> None:
        if statement.lstrip().upper().startswith("SELECT"):
            statements.append(statement)

    engine = database._reader.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)
