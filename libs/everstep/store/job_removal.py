"""Removes jobs from the record: each as a unit, in small transactions that let writers pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import Table, delete, exists, insert, select, tuple_
from sqlalchemy.exc import IntegrityError

from everstep.store import tables
from everstep.store.database import Database

_STAY = frozenset({tables.nodes})
"""A node outlives the jobs that it was part of."""


def _of_jobs() -> tuple[Table, ...]:
    """The tables with rows of jobs. Facts are last but one: until then, a rebuild adds rows."""
    projected = (table for table in tables.projected.values() if "job" in table.c)
    return (*(table for table in projected if table not in _STAY), tables.facts, tables.kept_blobs)


@dataclass(frozen=True, slots=True)
class OldJob:
    """A job whose last fact is old enough."""

    job: str
    updated_us: int
    last_n: int
    labels: str | None
    is_corrected: bool
    """A person has named the cause of one of its incidents."""


@dataclass(slots=True)
class Removal:
    """A removal under way: the tables that may still have rows of the job."""

    job: str
    facts: int = 0
    rows: int = 0
    """Of all tables, facts included."""
    left: list[Table] = field(default_factory=lambda: list(_of_jobs()))
    removed_since: int = 0
    """Rows since the tables were looked through from the first."""


class JobRemovals:
    """The removals in one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def old_jobs(self, before_us: int, *, most: int, after_us: int = 0) -> list[OldJob]:
        """Jobs whose last fact came before that, the oldest first."""
        jobs, corrections = tables.jobs.c, tables.verdict_corrections.c
        is_corrected = exists(select(corrections.job).where(corrections.job == jobs.job))
        query = (
            select(jobs.job, jobs.updated_us, jobs.last_n, jobs.labels, is_corrected)
            .where(jobs.updated_us < before_us, jobs.updated_us > after_us)
            .order_by(jobs.updated_us)
            .limit(most)
        )
        async with self._database.read() as connection:
            return [OldJob(*row) for row in await connection.execute(query)]

    async def unfinished(self) -> list[str]:
        """Jobs whose removal was begun."""
        removals = tables.removals.c
        async with self._database.read() as connection:
            query = select(removals.job).order_by(removals.begun_us)
            return list((await connection.execute(query)).scalars())

    async def begin(self, job: str, now_us: int) -> Removal:
        """From now on the job is in no list, and its removal is finished whatever happens."""
        async with self._database.write() as connection:
            await connection.execute(delete(tables.jobs).where(tables.jobs.c.job == job))
            try:
                async with connection.begin_nested():
                    row = {"job": job, "begun_us": now_us}
                    await connection.execute(insert(tables.removals).values(row))
            except IntegrityError:
                pass  # begun before
        return Removal(job)

    async def remove_some(self, removal: Removal, most: int) -> bool:
        """Remove up to `most` rows, in one short transaction; False when there are none left.

        The rows are found by a reader: the writer's lock is held for the deletion only.
        """
        while removal.left:
            table = removal.left[0]
            keys = await self._keys(table, removal.job, most)
            if keys:
                await self._delete(table, keys)
                removal.rows += len(keys)
                removal.facts += len(keys) if table is tables.facts else 0
                removal.removed_since += len(keys)
                return True
            removal.left.pop(0)
        if removal.removed_since:
            # A rebuild in parallel may have made rows of facts that are gone by now: look again.
            removal.removed_since = 0
            removal.left = list(_of_jobs())
            return await self.remove_some(removal, most)
        return False

    async def finish(self, job: str) -> None:
        """Nothing of it is left."""
        async with self._database.write() as connection:
            await connection.execute(delete(tables.removals).where(tables.removals.c.job == job))

    async def _keys(self, table: Table, job: str, most: int) -> Sequence[tuple[object, ...]]:
        keys = list(table.primary_key.columns)
        query = select(*keys).where(table.c.job == job).limit(most)
        async with self._database.read() as connection:
            return [tuple(row) for row in await connection.execute(query)]

    async def _delete(self, table: Table, keys: Sequence[tuple[object, ...]]) -> None:
        columns = list(table.primary_key.columns)
        here = (
            columns[0].in_([key[0] for key in keys])
            if len(columns) == 1
            else tuple_(*columns).in_(keys)
        )
        async with self._database.write() as connection:
            await connection.execute(delete(table).where(here))
