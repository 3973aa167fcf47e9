"""The two statements that the log and its projections are written with, for each database."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, bindparam, case, func, literal_column, or_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from everstep.store.changes import Column, Key, Rule, Shape, Value

Row = tuple[Any, ...]
Columns = ReadOnlyColumnCollection[str, Any]


_PLANS = 256
"""How many combinations of columns get a statement of their own."""


class Insert:
    """An insert compiled once, and given its rows as plain tuples.

    SQLAlchemy's own path makes a dict of each row and a tuple of each dict: a third of the
    cost of a fact.
    """

    def __init__(self, table: Table, dialect: Dialect) -> None:
        names = [column.name for column in table.columns]
        self._sql = _compiled(_insert(table, dialect), names, dialect)

    async def run(self, connection: AsyncConnection, rows: Sequence[Row]) -> None:
        """Write rows that have every column, in the table's order."""
        if rows:
            await connection.exec_driver_sql(self._sql, list(rows))


class Upsert:
    """Merges changes into one projected table by its columns' rules.

    Rows are grouped by the columns that they change: most facts change few of many.
    """

    def __init__(self, shape: Shape, table: Table, dialect: Dialect) -> None:
        self._shape = shape
        self._table = table
        self._dialect = dialect
        self._plans: dict[frozenset[str], tuple[list[str], str]] = {}
        self._every = self._plan(frozenset(shape.columns))

    async def run(
        self, connection: AsyncConnection, changes: Mapping[Key, Mapping[str, Value]]
    ) -> None:
        """Merge the changes. Sorted, so that writers lock rows in the same order."""
        groups: dict[frozenset[str], list[Key]] = {}
        for key, values in changes.items():
            groups.setdefault(frozenset(values), []).append(key)
        for names, keys in sorted(groups.items(), key=lambda group: group[1][0]):
            columns, sql = self._plan(names)
            rows = [
                (*key, *[values.get(name) for name in columns])
                for key in sorted(keys)
                for values in (changes[key],)
            ]
            await connection.exec_driver_sql(sql, cleaned(rows))

    def _plan(self, names: frozenset[str]) -> tuple[list[str], str]:
        plan = self._plans.get(names)
        if plan is None:
            if len(self._plans) == _PLANS:
                return self._every
            columns = [name for name in self._shape.columns if name in names]
            plan = self._plans[names] = columns, self._compile(columns)
        return plan

    def _compile(self, columns: list[str]) -> str:
        insert = _insert(self._table, self._dialect)
        rules = {
            name: _merged(self._shape.columns[name], name, self._table.c, insert.excluded)
            for name in columns
        }
        insert = insert.on_conflict_do_update(index_elements=list(self._shape.key), set_=rules)
        return _compiled(insert, [*self._shape.key, *columns], self._dialect)


def cleaned(rows: list[Row]) -> list[Row]:
    """The rows without what PostgreSQL refuses in a text."""
    for index, row in enumerate(rows):
        for value in row:
            if type(value) is str and "\x00" in value:
                rows[index] = tuple(
                    v.replace("\x00", "\ufffd") if isinstance(v, str) else v for v in row
                )
                break
    return rows


def _insert(table: Table, dialect: Dialect) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if dialect.name == "sqlite" else postgresql.insert(table)


def _compiled(insert: sqlite.Insert | postgresql.Insert, names: list[str], dialect: Dialect) -> str:
    values: dict[str, Any] = {name: bindparam(name) for name in names}
    compiled = insert.values(values).compile(dialect=dialect)
    assert list(compiled.positiontup or ()) == names, "tuples come in this order"
    return str(compiled)


def _merged(column: Column, name: str, table: Columns, excluded: Columns) -> ColumnElement[Any]:
    old, new = table[name], excluded[name]
    match column.rule:
        case Rule.SUM:
            nothing: ColumnElement[int] = literal_column("0")
            return func.coalesce(old, nothing) + func.coalesce(new, nothing)
        case Rule.LEAST:
            return case((or_(old.is_(None), new < old), new), else_=old)
        case Rule.GREATEST:
            return case((or_(old.is_(None), new > old), new), else_=old)
        case Rule.FOLLOW:
            assert column.leader is not None
            was, now = table[column.leader], excluded[column.leader]
            return case((or_(was.is_(None), now > was), new), else_=old)
