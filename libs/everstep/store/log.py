"""The log of facts and what is projected from it: written together, once, in stream order."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from everstep.messages import Fact, kind_of
from everstep.messages.codec import fact_in
from everstep.store import tables
from everstep.store.database import Database
from everstep.store.errors import SchemaTooNewError
from everstep.store.projected.changes import Changes, LoggedFact
from everstep.store.projected.registry import VERSION
from everstep.store.upserts import Insert, Row, upserts

log = logging.getLogger(__name__)

_AT_ONCE_BYTES = 16 << 20


class NewFact(NamedTuple):
    """One fact on its way into the log; `fact` is None when its kind is not known here."""

    sequence: int
    id: str
    job: str
    kind: str
    round: int | None
    node: str | None
    at_us: int
    source: str
    body: str
    fact: Fact | None


Fold = Callable[[Iterable[LoggedFact]], Changes]


@dataclass(frozen=True, slots=True)
class Appended:
    """The outcome of a batch."""

    last_n: int
    """The newest fact of the log, whether or not it was in this batch."""
    added: int
    duplicates: int
    is_projected: bool
    """False while a rebuild has not reached the end of the log: `catch_up` will."""
    unprojected: int = 0
    """Facts of the batch that are in the log, and whose projection failed."""


@dataclass(frozen=True, slots=True)
class _Head:
    last_n: int
    projected_n: int
    projection: int


class FactLog:
    """The only writer of facts and projections.

    Any number may exist, a late one included: each write takes the same row lock, sees what
    the others wrote, and skips it.
    """

    def __init__(self, database: Database, fold: Fold) -> None:
        self._database = database
        self._fold = fold
        self._unprojected = 0
        self._insert = Insert(tables.facts, database.dialect)
        self._upserts = upserts(type(database.dialect))  # type: ignore[arg-type]  # a class has a hash

    async def append(
        self, stream: str, batch: Sequence[NewFact], *, sequence: int, received_us: int
    ) -> Appended:
        """Write the new facts of a batch, their projection, and the position; or nothing.

        `sequence` is the position after the batch; messages that could not be read are
        passed by it. A fact whose id is known is skipped, whatever its sequence: streams are
        wiped, set back and filled again.
        """
        before = self._unprojected
        async with self._database.write() as connection:
            head = await self._lock(connection)
            new = await self._add(connection, stream, batch, head.last_n, received_us)
            last_n = head.last_n + len(new)
            is_projected = head.projected_n == head.last_n
            if is_projected:
                await self._project(connection, _recorded(new, head.last_n, received_us))
            projected_n = last_n if is_projected else head.projected_n
            await _advance(connection, stream, sequence, received_us)
            await _set_head(connection, last_n=last_n, projected_n=projected_n)
        unprojected = self._unprojected - before
        return Appended(last_n, len(new), len(batch) - len(new), is_projected, unprojected)

    async def catch_up(self, most: int = 2000) -> int:
        """Project up to `most` facts of a rebuild; return how many remain."""
        async with self._database.write() as connection:
            head = await self._lock(connection)
            rows = await _after(connection, head.projected_n, most)
            await self._project(connection, _decoded(rows))
            projected_n = rows[-1].n if rows else head.last_n
            await _set_head(connection, last_n=head.last_n, projected_n=projected_n)
        return head.last_n - projected_n

    async def start_rebuild(self) -> int:
        """Empty the projected tables for `catch_up` to fill; return how many facts remain."""
        async with self._database.write() as connection:
            head = await self._lock(connection)
            for table in tables.projected.values():
                await connection.execute(delete(table))
            await _set_head(connection, last_n=head.last_n, projected_n=0)
        return head.last_n

    async def _lock(self, connection: AsyncConnection) -> _Head:
        meta = tables.meta.c
        query = select(meta.last_n, meta.projected_n, meta.projection).with_for_update()
        head = _Head(*(await connection.execute(query)).one())
        if head.projection > VERSION:
            found, known = f"projection {head.projection}", f"projection {VERSION}"
            raise SchemaTooNewError(self._database.place, found, known)
        return head

    async def _add(
        self,
        connection: AsyncConnection,
        stream: str,
        batch: Sequence[NewFact],
        last_n: int,
        received_us: int,
    ) -> Sequence[NewFact]:
        """Write the facts that the log does not have: the first of each id."""

        def rows(facts: Sequence[NewFact]) -> list[Row]:
            return [_row(stream, n, received_us, f) for n, f in enumerate(facts, last_n + 1)]

        new = list({fact.id: fact for fact in reversed(batch)}.values())[::-1]
        try:
            # Almost always all are new, and the index finds that out while it is written.
            async with connection.begin_nested():
                await self._insert.run(connection, rows(new))
        except IntegrityError:
            seen = await _seen(connection, [fact.id for fact in new])
            new = [fact for fact in new if fact.id not in seen]
            await self._insert.run(connection, rows(new))
        return new

    async def _project(self, connection: AsyncConnection, recorded: Iterable[LoggedFact]) -> None:
        for shape, rows in self._changes(list(recorded)):
            await self._upserts[shape].run(connection, rows)

    def _changes(self, recorded: Sequence[LoggedFact]) -> Changes:
        """What the facts change; one whose projection fails changes nothing."""
        try:
            return self._fold(recorded)
        except Exception:  # noqa: BLE001  one fact must not keep all others from the tables
            return self._fold([item for item in recorded if self._can_fold(item)])

    def _can_fold(self, entry: LoggedFact) -> bool:
        try:
            self._fold([entry])
        except Exception:
            self._unprojected += 1
            log.exception("fact_unprojected kind=%s id=%s", kind_of(entry.fact), entry.fact.id)
            return False
        return True


async def _after(connection: AsyncConnection, n: int, most: int) -> Sequence[Any]:
    """The next facts to project: at most `most`, and not much more than `_AT_ONCE_BYTES`."""
    facts = tables.facts.c
    sizes = select(facts.n, facts.size).where(facts.n > n).order_by(facts.n).limit(most)
    end, room = n, _AT_ONCE_BYTES
    for end, size in await connection.execute(sizes):  # noqa: B007  the last one is kept
        room -= size
        if room < 0:
            break
    query = select(facts.n, facts.received_us, facts.body)
    query = query.where(facts.n > n, facts.n <= end).order_by(facts.n)
    return (await connection.execute(query)).all()


async def _advance(connection: AsyncConnection, stream: str, sequence: int, now_us: int) -> None:
    values = {"sequence": sequence, "updated_us": now_us}
    here = tables.positions.c.stream == stream
    done = await connection.execute(update(tables.positions).where(here).values(values))
    if not done.rowcount:
        row = {"stream": stream, **values}
        await connection.execute(insert(tables.positions).values(row))


async def _set_head(connection: AsyncConnection, *, last_n: int, projected_n: int) -> None:
    values = {"last_n": last_n, "projected_n": projected_n}
    await connection.execute(update(tables.meta).values(values))


async def _seen(connection: AsyncConnection, ids: Sequence[str]) -> set[str]:
    query = select(tables.facts.c.id).where(tables.facts.c.id.in_(ids))
    return set((await connection.execute(query)).scalars())


def _row(stream: str, n: int, received_us: int, fact: NewFact) -> Row:
    return (
        n,
        fact.id,
        stream,
        fact.sequence,
        fact.job,
        fact.kind,
        fact.round,
        fact.node,
        fact.at_us,
        fact.source,
        received_us,
        len(fact.body),
        fact.body,
    )


def _recorded(new: Sequence[NewFact], before: int, received_us: int) -> Iterable[LoggedFact]:
    for n, fact in enumerate(new, before + 1):
        if fact.fact is not None:
            yield LoggedFact(n, received_us, fact.fact)


def _decoded(rows: Iterable[Any]) -> Iterable[LoggedFact]:
    for n, received_us, body in rows:
        fact = fact_in(body)
        if fact is not None:
            yield LoggedFact(n, received_us, fact)
