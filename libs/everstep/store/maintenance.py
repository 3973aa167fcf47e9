"""Notices of maintenance: kept, rescheduled, cancelled, and taken by one replica when due."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sqlalchemy import delete, func, insert, select, update

from everstep.store.database import Database
from everstep.store.tables import maintenance

MaintenanceAction = Literal["drain", "exclude"]
MaintenanceState = Literal["waiting", "done", "observed", "refused", "failed", "cancelled"]
_KEEP_US: Final = 90 * 86400 * 1_000_000
"""How long a notice is kept after it ended."""


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

        All or none are written. The same message again changes nothing.
        """
        async with self._database.write() as connection:
            changes: list[NoticeChange] = []
            for notice in notices:
                here = _is(notice.sender, notice.id, notice.node)
                row = (await connection.execute(select(maintenance).where(here))).mappings().first()
                if row is None:
                    await connection.execute(insert(maintenance).values(asdict(notice)))
                    changes.append(NoticeChange(notice))
                    continue
                earlier = _notice(row)
                if earlier.state != "waiting" or earlier.sent_us >= notice.sent_us:
                    changes.append(NoticeChange(earlier, is_stale=not _same(earlier, notice)))
                    continue
                await connection.execute(update(maintenance).where(here).values(asdict(notice)))
                changes.append(NoticeChange(notice))
            return changes

    async def cancel(
        self, sender: str | None, id_: str, *, sent_us: int, outcome: str
    ) -> tuple[list[MaintenanceNotice], int]:
        """Cancel what waits; the notices with this id, and how many were cancelled now."""
        table = maintenance.c
        here = table.id == id_
        if sender is not None:
            here &= table.sender == sender
        waits = here & (table.state == "waiting") & (table.sent_us <= sent_us)
        async with self._database.write() as connection:
            done = await connection.execute(
                update(maintenance)
                .where(waits)
                .values(state="cancelled", outcome=outcome, sent_us=sent_us)
            )
            rows = (await connection.execute(select(maintenance).where(here))).mappings().all()
        return [_notice(row) for row in rows], done.rowcount

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
                    taken.append(_notice({**row, "attempts": row["attempts"] + 1}))
        return taken

    async def end(self, notice: MaintenanceNotice, state: MaintenanceState, outcome: str) -> None:
        """Write what became of it; `waiting` leaves it due again."""
        here = _is(notice.sender, notice.id, notice.node) & (maintenance.c.state == "waiting")
        async with self._database.write() as connection:
            await connection.execute(
                update(maintenance).where(here).values(state=state, outcome=outcome)
            )

    async def forget_old(self, now_us: int) -> None:
        """Delete what ended long ago."""
        table = maintenance.c
        old = (table.state != "waiting") & (table.starts_us < now_us - _KEEP_US)
        async with self._database.write() as connection:
            await connection.execute(delete(maintenance).where(old))


def _is(sender: str, id_: str, node: str) -> Any:
    table = maintenance.c
    return (table.sender == sender) & (table.id == id_) & (table.node == node)


def _same(earlier: MaintenanceNotice, other: MaintenanceNotice) -> bool:
    """The same announcement, whenever it was sent."""
    return (earlier.action, earlier.starts_us, earlier.ends_us, earlier.reason) == (
        other.action, other.starts_us, other.ends_us, other.reason,
    )  # fmt: skip


def _notice(row: Mapping[Any, Any]) -> MaintenanceNotice:
    return MaintenanceNotice(**{str(name): value for name, value in row.items()})
