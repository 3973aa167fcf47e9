"""The newest facts, read once for all live streams."""

import asyncio
from collections import deque
from collections.abc import Sequence

from everstep.store.database import Database
from everstep.store.queries import LogHead, Record, facts_after, log_head
from everstep_services.history.notifier import LogNotifier

_KEPT_FACTS = 5000
_KEPT_BYTES = 16 << 20
_AT_ONCE = 500
_AT_ONCE_BYTES = 2 << 20


class Feed:
    """A window over the end of the log, moved on by the first caller that asks for more."""

    def __init__(self, database: Database, notifier: LogNotifier) -> None:
        self._database = database
        self._notifier = notifier
        self._recent: deque[Record] = deque()
        self._bytes = 0
        self._lock = asyncio.Lock()
        self._head_lock = asyncio.Lock()
        self._head: tuple[float, LogHead] | None = None
        self.listeners: dict[str, int] = {}
        """Open live streams by token."""

    @property
    def notifier(self) -> LogNotifier:
        """Notifies when the log grows."""
        return self._notifier

    async def head(self) -> LogHead:
        """How far the log reaches; clients that come together cost one query."""
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        async with self._head_lock:
            if self._head is None or self._head[0] < asked_at:
                begun_at = clock()
                self._head = begun_at, await log_head(self._database)
            return self._head[1]

    async def after(self, n: int) -> Sequence[Record]:
        """The next facts after `n`, some hundreds at most; none at the end of the log."""
        if self._has(n):
            return self._slice(n)
        async with self._lock:  # the other callers find the rows that the first one has read
            if self._has(n):
                return self._slice(n)
            rows, head = await facts_after(
                self._database, n, most=_AT_ONCE, most_bytes=_AT_ONCE_BYTES
            )
            self._notifier.announce(head.last_n)
            self._keep(n, rows)
            return rows

    def _has(self, n: int) -> bool:
        return bool(self._recent) and self._recent[0]["n"] <= n + 1 <= self._recent[-1]["n"]

    def _slice(self, n: int) -> Sequence[Record]:
        begin = n + 1 - int(self._recent[0]["n"])  # the log has no gaps
        end = min(begin + _AT_ONCE, len(self._recent))
        return [self._recent[index] for index in range(begin, end)]

    def _keep(self, n: int, rows: Sequence[Record]) -> None:
        if self._recent and self._recent[-1]["n"] != n:
            if n < self._recent[-1]["n"]:
                return  # this caller reads old facts
            self._recent.clear()
            self._bytes = 0
        for row in rows:
            self._recent.append(row)
            self._bytes += row["size"]
        while len(self._recent) > _KEPT_FACTS or self._bytes > _KEPT_BYTES:
            self._bytes -= self._recent.popleft()["size"]
