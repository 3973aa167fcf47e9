"""Reads the facts of goodput from the log, and remembers them by job."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Select, select

from everstep.messages import kind_of
from everstep.messages.codec import fact_in
from everstep.store import tables
from everstep.store.database import Database
from everstep_services.history.goodput.ledger import LedgerSegment, segments
from everstep_services.history.goodput.trace import KINDS, GoodputTrace

_JOBS_MOST = 2048
"""The most jobs to remember; the job that was asked about the longest ago is read again."""
_AT_ONCE = 2000
_JOBS_AT_ONCE = 200
_LONG_TRACE = 2000
"""To put more facts together takes a thread: others wait for the loop."""
_FRESH_S = 1.0
"""A page asks several times for the same job."""
_KIND_NAMES = tuple(kind_of(kind) for kind in KINDS)


@dataclass(frozen=True, slots=True)
class JobNews:
    """A job as its table says: how far its facts reach in the log, and how many there are."""

    job: str
    last_n: int
    facts: int


@dataclass(slots=True)
class _Known:
    """A job's facts until a place in the log."""

    trace: GoodputTrace = field(default_factory=GoodputTrace)
    read_n: int = 0
    taken: int = 0
    """How many facts the trace has."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _put_together: tuple[float, list[LedgerSegment]] | None = None

    def take(self, rows: Sequence[Any]) -> None:
        """Add facts from the log, in its order."""
        facts = [(fact_in(row.body), row.received_us / 1e6) for row in rows]
        read = [(fact, by_s) for fact, by_s in facts if isinstance(fact, KINDS)]
        if read:
            self.trace.take((fact for fact, _ in read), (by_s for _, by_s in read))
            self.taken += len(read)
            self._put_together = None
        if rows:
            self.read_n = rows[-1].n

    async def segments(self, now_s: float) -> list[LedgerSegment]:
        """The time until now, or until less than a second ago."""
        async with self.lock:
            if self._put_together is not None:
                at_s, parts = self._put_together
                if self._is_over() or 0 <= now_s - at_s < _FRESH_S:
                    return parts
            if self.taken > _LONG_TRACE:
                parts = await asyncio.to_thread(segments, self.trace, now_s)
            else:
                parts = segments(self.trace, now_s)
            self._put_together = now_s, parts
            return parts

    def _is_over(self) -> bool:
        return all(allocation.ended_s is not None for allocation in self.trace.allocations)


class GoodputReader:
    """Continues where a job was read the last time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def segments(self, job: str, now_s: float) -> list[LedgerSegment]:
        """How a job spent its time until now; empty where no allocation of it is known."""
        state = self._of(job)
        async with state.lock:
            while await self._read_on(job, state):
                pass
        return await state.segments(now_s)

    async def segments_of_many(
        self, jobs: Sequence[JobNews], now_s: float
    ) -> AsyncIterator[tuple[str, list[LedgerSegment]]]:
        """The same, job by job: without news for no query, with little news for one together."""
        states = {news.job: self._of(news.job) for news in jobs}
        behind = [news for news in jobs if news.last_n > states[news.job].read_n]
        behind.sort(key=lambda news: states[news.job].read_n)
        sizes = [min(news.facts, news.last_n - states[news.job].read_n) for news in behind]
        for group in _groups(behind, sizes):
            await self._read_group({news.job: states[news.job] for news in group}, group)
        for news in jobs:
            await asyncio.sleep(0)  # others have their turn between two jobs
            yield news.job, await states[news.job].segments(now_s)

    def _of(self, job: str) -> _Known:
        state = self._known.setdefault(job, _Known())
        self._known.move_to_end(job)
        while len(self._known) > _JOBS_MOST:
            self._known.popitem(last=False)
        return state

    async def _read_on(self, job: str, state: _Known) -> bool:
        """Take some more facts. Returns whether there may be others."""
        facts = tables.facts.c
        query = _facts().where(
            facts.job == job, facts.n > state.read_n, facts.kind.concat("").in_(_KIND_NAMES)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(facts.n).limit(_AT_ONCE))).all()
        state.take(rows)
        return len(rows) == _AT_ONCE

    async def _read_group(self, states: Mapping[str, _Known], group: Sequence[JobNews]) -> None:
        """Take the news of some jobs, which are few together; or all news of one job."""
        facts = tables.facts.c
        async with AsyncExitStack() as held:
            for job in sorted(states):
                await held.enter_async_context(states[job].lock)
            if len(group) == 1:
                (news,) = group
                while await self._read_on(news.job, states[news.job]):
                    pass
                states[news.job].read_n = max(states[news.job].read_n, news.last_n)
                return
            query = _facts().where(
                facts.job.in_(states),
                facts.n > min(state.read_n for state in states.values()),
                facts.kind.concat("").in_(_KIND_NAMES),
            )
            async with self._database.read() as connection:
                rows = sorted((await connection.execute(query)).all(), key=lambda row: row.n)
            for news in group:
                here = states[news.job]
                here.take([row for row in rows if row.job == news.job and row.n > here.read_n])
                here.read_n = max(here.read_n, news.last_n)


def _facts() -> Select[Any]:
    # Callers filter by `kind.concat("")`: with the plain column, SQLite takes the index of kinds,
    # and reads those of all jobs.
    facts = tables.facts.c
    return select(facts.n, facts.job, facts.received_us, facts.body)


def _groups(jobs: Sequence[JobNews], sizes: Sequence[int]) -> Iterator[Sequence[JobNews]]:
    """Jobs with about as many facts to read as one query may bring; a larger job is alone."""
    group: list[JobNews] = []
    room = _AT_ONCE
    for news, size in zip(jobs, sizes, strict=True):
        if group and (size > room or len(group) == _JOBS_AT_ONCE):
            yield group
            group, room = [], _AT_ONCE
        group.append(news)
        room -= size
    if group:
        yield group
