"""Notices of maintenance: kept, rescheduled, cancelled, and taken by one replica when due."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from everstep.store.database import Database
from everstep.store.tables import maintenance

MaintenanceAction = Literal["drain", "exclude"]
MaintenanceState = Literal["waiting", "done", "observed", "refused", "failed", "cancelled"]
_KEEP_US: Final = 90 * 86400 * 1_000_000
"""How long a notice is kept after it ended."""
ALL_NODES: Final = ""
"""The node of the row that cancels an id: it holds for messages that arrive later, too."""


@dataclass(frozen=True, slots=True)
class MaintenanceNotice:
    """One announcement about one node."""

    sender: str
    id: str
    node: str
    action: MaintenanceAction
    starts_us: int
    ends_us: int | None
    reason: str
    sent_us: int
    """When the sender signed it: an older message changes nothing."""
    received_us: int
    state: MaintenanceState = "waiting"
    outcome: str = ""
    next_us: int = 0
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class NoticeChange:
    """What became of a message about a notice."""

    notice: MaintenanceNotice
    """As it is now."""
    is_stale: bool = False
    """A newer message had been there, or the notice is over: nothing was changed."""


class MaintenanceNotices:
    """The notices of one database. Any replica may write."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, notices: Iterable[MaintenanceNotice]) -> list[NoticeChange]:
        """Keep notices; of those that are known, take the new times while they wait.

        All or none are written. The same message again changes nothing, and an id that was
        cancelled stays cancelled, in whatever order messages arrive.
        """
        wanted = list(notices)
        async with self._database.write() as connection:
            for id_ in sorted({notice.id for notice in wanted}):
                await self._lock(connection, id_)
            return [await _put(connection, notice) for notice in wanted]

    async def cancel(
        self, sender: str | None, id_: str, *, at_us: int, outcome: str
    ) -> tuple[list[MaintenanceNotice], int]:
        """Cancel an id, for ever: that of a sender, or of all senders who have announced it.

        The notices with this id, and how many of them were cancelled now.
        """
        table = maintenance.c
        here = table.id == id_
        if sender is not None:
            here &= table.sender == sender
        of_nodes = here & (table.node != ALL_NODES)
        async with self._database.write() as connection:
            await self._lock(connection, id_)
            for name in [sender] if sender is not None else await _senders(connection, id_):
                whole = _is(name, id_, ALL_NODES)
                if (await connection.execute(select(table.id).where(whole))).first() is None:
                    row = asdict(_cancellation(name, id_, at_us, outcome))
                    await connection.execute(insert(maintenance).values(row))
            done = await connection.execute(
                update(maintenance)
                .where(of_nodes, table.state == "waiting")
                .values(state="cancelled", outcome=outcome)
            )
            shown = select(maintenance).where(of_nodes).order_by(table.sender, table.node)
            rows = (await connection.execute(shown)).mappings().all()
        return [notice_of(row) for row in rows], done.rowcount

    async def _lock(self, connection: AsyncConnection, id_: str) -> None:
        """Until this transaction ends, no other message about the id is taken.

        SQLite has one writer anyhow.
        """
        if self._database.kind == "postgresql":
            lock = func.pg_advisory_xact_lock(func.hashtextextended(id_, 0))
            await connection.execute(select(lock))

    async def waiting(self, sender: str) -> int:
        """How many notices of a sender wait."""
        table = maintenance.c
        query = select(func.count()).where(table.sender == sender, table.state == "waiting")
        async with self._database.read() as connection:
            return int((await connection.execute(query)).scalar_one())

    async def take_due(self, now_us: int, again_us: int, most: int) -> list[MaintenanceNotice]:
        """Due notices; each is due again at `again_us`, should the replica die before it ends."""
        table = maintenance.c
        query = (
            select(maintenance)
            .where(table.state == "waiting", table.next_us <= now_us)
            .order_by(table.next_us)
            .limit(most)
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).mappings().all()
        if not rows:
            return []
        taken: list[MaintenanceNotice] = []
        async with self._database.write() as connection:
            for row in rows:
                mine = _is(row["sender"], row["id"], row["node"])
                mine &= (table.state == "waiting") & (table.next_us == row["next_us"])
                done = await connection.execute(
                    update(maintenance)
                    .where(mine)
                    .values(next_us=again_us, attempts=row["attempts"] + 1)
                )
                if done.rowcount:
                    taken.append(notice_of({**row, "attempts": row["attempts"] + 1}))
        return taken

    async def end(self, notice: MaintenanceNotice, state: MaintenanceState, outcome: str) -> None:
        """Write what became of it; `waiting` leaves it due again.

        What was done while a cancellation arrived is `done`: the record must not deny it.
        """
        here, table = _is(notice.sender, notice.id, notice.node), maintenance.c
        late = f"{outcome}; cancelled too late"
        async with self._database.write() as connection:
            for before, text in (("waiting", outcome), ("cancelled", late)):
                if before == "waiting" or state == "done":
                    await connection.execute(
                        update(maintenance)
                        .where(here, table.state == before)
                        .values(state=state, outcome=text)
                    )

    async def forget_old(self, now_us: int) -> None:
        """Delete what ended long ago."""
        table = maintenance.c
        old = (table.state != "waiting") & (table.starts_us < now_us - _KEEP_US)
        async with self._database.write() as connection:
            await connection.execute(delete(maintenance).where(old))


async def _put(connection: AsyncConnection, notice: MaintenanceNotice) -> NoticeChange:
    here = _is(notice.sender, notice.id, notice.node)
    query = select(maintenance).where(here).with_for_update()
    row = (await connection.execute(query)).mappings().first()
    if row is not None:
        earlier = notice_of(row)
        if earlier.state != "waiting" or earlier.sent_us >= notice.sent_us:
            is_stale = earlier.state == "cancelled" or not _same(earlier, notice)
            return NoticeChange(earlier, is_stale=is_stale)
        await connection.execute(update(maintenance).where(here).values(asdict(notice)))
        return NoticeChange(notice)
    whole = select(maintenance.c.outcome).where(_is(notice.sender, notice.id, ALL_NODES))
    outcome = (await connection.execute(whole)).scalar()
    if outcome is not None:
        notice = replace(notice, state="cancelled", outcome=outcome)
    await connection.execute(insert(maintenance).values(asdict(notice)))
    return NoticeChange(notice, is_stale=outcome is not None)


async def _senders(connection: AsyncConnection, id_: str) -> list[str]:
    query = select(maintenance.c.sender).where(maintenance.c.id == id_).distinct()
    return sorted((await connection.execute(query)).scalars())


def _cancellation(sender: str, id_: str, at_us: int, outcome: str) -> MaintenanceNotice:
    return MaintenanceNotice(
        sender=sender, id=id_, node=ALL_NODES, action="drain", starts_us=at_us, ends_us=None,
        reason="", sent_us=at_us, received_us=at_us, state="cancelled", outcome=outcome,
    )  # fmt: skip


def _is(sender: str, id_: str, node: str) -> Any:
    table = maintenance.c
    return (table.sender == sender) & (table.id == id_) & (table.node == node)


def _same(earlier: MaintenanceNotice, other: MaintenanceNotice) -> bool:
    """The same announcement, whenever it was sent."""
    return (earlier.action, earlier.starts_us, earlier.ends_us, earlier.reason) == (
        other.action, other.starts_us, other.ends_us, other.reason,
    )  # fmt: skip


def notice_of(row: Mapping[Any, Any]) -> MaintenanceNotice:
    """The notice of a row."""
    return MaintenanceNotice(**{str(name): value for name, value in row.items()})
