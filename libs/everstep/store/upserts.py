"""The two statements that the log and its projections are written with, for each database."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Table, bindparam, case, func, literal_column, or_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from everstep.store import tables
from everstep.store.projected.changes import Column, Key, MergeRule, ProjectedTable, Type, Value

Row = tuple[Any, ...]
Columns = ReadOnlyColumnCollection[str, Any]


_PLANS = 256
"""How many combinations of columns of a table get a statement of their own."""


_LONGEST: Mapping[Type, int] = {"text": 8192, "json": 65_536}
"""In characters."""


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


@dataclass(frozen=True, slots=True)
class _Plan:
    columns: list[str]
    sql: str
    longest: Mapping[int, int]
    """Which places of a row hold texts, and how long they may be."""


class Upsert:
    """Merges changes into one projected table by its columns' rules.

    Rows are grouped by the columns that they change: most facts change few of many.
    """

    def __init__(self, shape: ProjectedTable, table: Table, dialect: Dialect) -> None:
        self._shape = shape
        self._table = table
        self._dialect = dialect
        self._plans: dict[frozenset[str], _Plan] = {}

    async def run(
        self, connection: AsyncConnection, changes: Mapping[Key, Mapping[str, Value]]
    ) -> None:
        """Merge the changes. Sorted, so that writers lock rows in the same order."""
        groups: dict[frozenset[str], list[Key]] = {}
        for key, values in changes.items():
            groups.setdefault(frozenset(values), []).append(key)
        for names, keys in sorted(groups.items(), key=lambda group: group[1][0]):
            plan = self._plan(names)
            rows = [
                (*key, *[values.get(name) for name in plan.columns])
                for key in sorted(keys)
                for values in (changes[key],)
            ]
            await connection.exec_driver_sql(plan.sql, bounded(rows, plan.longest))

    def _plan(self, names: frozenset[str]) -> _Plan:
        if names not in self._plans and len(self._plans) >= _PLANS:
            names = frozenset(self._shape.columns)
        plan = self._plans.get(names)
        if plan is None:
            columns = [name for name in self._shape.columns if name in names]
            types = [*self._shape.key.values(), *(self._shape.columns[n].type for n in columns)]
            longest = {i: _LONGEST[t] for i, t in enumerate(types) if t in _LONGEST}
            plan = self._plans[names] = _Plan(columns, self._compile(columns), longest)
        return plan

    def _compile(self, columns: list[str]) -> str:
        insert = _insert(self._table, self._dialect)
        rules = {
            name: _merged(self._shape.columns[name], name, self._table.c, insert.excluded)
            for name in columns
        }
        insert = insert.on_conflict_do_update(index_elements=list(self._shape.key), set_=rules)
        return _compiled(insert, [*self._shape.key, *columns], self._dialect)


@cache
def upserts(dialect: type[Dialect]) -> Mapping[ProjectedTable, Upsert]:
    """One for each projected table; all logs of a process share their statements."""
    of = dialect()
    return {shape: Upsert(shape, table, of) for shape, table in tables.projected.items()}


def bounded(rows: list[Row], longest: Mapping[int, int]) -> list[Row]:
    """The rows with texts that a page can show, and PostgreSQL takes; the log has them whole."""
    for index, row in enumerate(rows):
        for place, limit in longest.items():
            text = row[place]
            if text is not None and (len(text) > limit or "\x00" in text):
                rows[index] = tuple(
                    _bounded(value, longest[i]) if i in longest else value
                    for i, value in enumerate(row)
                )
                break
    return rows


def _bounded(text: str | None, limit: int) -> str | None:
    if text is None or (len(text) > limit and limit == _LONGEST["json"]):
        return None  # a part of a structure cannot be decoded
    return text[:limit].replace("\x00", "\ufffd")


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
        case MergeRule.SUM:
            nothing: ColumnElement[int] = literal_column("0")
            return func.coalesce(old, nothing) + func.coalesce(new, nothing)
        case MergeRule.LEAST:
            return case((or_(old.is_(None), new < old), new), else_=old)
        case MergeRule.GREATEST:
            return case((or_(old.is_(None), new > old), new), else_=old)
        case MergeRule.FOLLOW:
            assert column.leader is not None
            was, now = table[column.leader], excluded[column.leader]
            return case((or_(was.is_(None), now > was), new), else_=old)
