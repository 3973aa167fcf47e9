"""Reads the facts of goodput from the log, and remembers them by job."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from sqlalchemy import select

from everstep.messages import Fact, decode, kind_of
from everstep.messages.codec import BadMessageError
from everstep.store import tables
from everstep.store.database import Database
from everstep_services.history.goodput.ledger import LedgerSegment, segments
from everstep_services.history.goodput.trace import KINDS, GoodputTrace

_JOBS_MOST = 2048
"""The most jobs to remember; the job that was asked about the longest ago is read again."""
_AT_ONCE = 2000
_KIND_NAMES = tuple(kind_of(kind) for kind in KINDS)


@dataclass(slots=True)
class _Known:
    """A job's facts until a place in the log."""

    trace: GoodputTrace = field(default_factory=GoodputTrace)
    read_n: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class GoodputReader:
    """Continues where a job was read the last time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def segments(self, job: str, now_s: float) -> list[LedgerSegment]:
        """How a job spent its time until now; empty where no allocation of it is known."""
        state = self._known.setdefault(job, _Known())
        self._known.move_to_end(job)
        while len(self._known) > _JOBS_MOST:
            self._known.popitem(last=False)
        async with state.lock:
            while await self._read_on(job, state):
                pass
            return segments(state.trace, now_s)

    async def _read_on(self, job: str, state: _Known) -> bool:
        """Take some more facts. Returns whether there may be others."""
        facts = tables.facts.c
        query = select(facts.n, facts.received_us, facts.body).where(
            facts.job == job, facts.n > state.read_n, facts.kind.in_(_KIND_NAMES)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query.order_by(facts.n).limit(_AT_ONCE))).all()
        if rows:
            read = [
                (fact, row.received_us / 1e6)
                for row in rows
                if (fact := _decoded(row.body)) is not None
            ]
            state.trace.take((fact for fact, _ in read), (by_s for _, by_s in read))
            state.read_n = rows[-1].n
        return len(rows) == _AT_ONCE


def _decoded(body: str) -> Fact | None:
    """The fact; None where this release cannot read it."""
    try:
        message = decode(body.encode())
    except BadMessageError:
        return None
    return message if isinstance(message, KINDS) else None
