"""Pages of lines from the log store: bounded in lines, in bytes and in what one search reads."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from everstep.bus.ports import LogScope, RankLogs, StoredPiece
from everstep.messages.rank_logs import LogIndex, SentLogFile
from everstep_services.history.rank_logs.lines import RankLine, SentOnce, merged
from everstep_services.history.rank_logs.search import matching

SCANNED_BYTES_MOST = 16 << 20
"""A page ends there, with or without lines, and says where to go on."""
_PAGE_BYTES_MOST = 4 << 20
_FETCH_BYTES = 1 << 20
_LOOKED_AT = 50
_SKEW_US = 600_000_000
"""The store's times are of its own clock: those of nodes may be this different."""


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines; None for all."""

    job: str
    round: int | None = None
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    stream: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    contains: str | None = None
    regex: str | None = None

    @property
    def selection(self) -> LogScope:
        """As far as the store itself can choose."""
        return LogScope(
            self.job, self.round, self.nodes[0] if len(self.nodes) == 1 else None,
            self.ranks[0] if len(self.ranks) == 1 else None, self.stream,
        )  # fmt: skip

    def wants(self, line: RankLine) -> bool:
        """Whether a line is one of them, as far as no process is needed for that."""
        return (
            (not self.nodes or line.node in self.nodes)
            and (not self.ranks or line.rank in self.ranks)
            and (self.since_us is None or line.at_us is None or line.at_us >= self.since_us)
            and (self.until_us is None or line.at_us is None or line.at_us <= self.until_us)
            and (self.contains is None or self.contains in line.text)
        )


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where a page begins: behind a piece, and behind some lines of the next piece."""

    after: int = 0
    skip: int = 0


@dataclass(frozen=True, slots=True)
class LinePage:
    """Lines by time, and where the next page begins."""

    lines: list[RankLine]
    next: LogPlace
    is_end: bool
    """There were no more at that moment."""
    scanned_bytes: int


@dataclass(slots=True)
class _Read:
    """What was read for a page until now."""

    next: LogPlace
    matches: list[tuple[LogPlace, RankLine]] = field(default_factory=list)
    is_end: bool = False
    scanned_bytes: int = 0
    size: int = 0

    def take(self, stored: StoredPiece, once: SentOnce, query: LogQuery, most: int) -> bool:
        """Take the lines of a piece; False when that is enough for a page."""
        before, skip = stored.sequence - 1, self.next.skip
        for taken, line in enumerate(once.fresh(stored.piece)):
            if taken < skip:
                continue
            if len(self.matches) >= most or self.size >= _PAGE_BYTES_MOST:
                self.next = LogPlace(before, taken)
                return False
            if query.wants(line):
                self.matches.append((LogPlace(before, taken + 1), line))
                self.size += len(line.text)
        self.next = LogPlace(stored.sequence)
        self.scanned_bytes += len(stored.piece.data)
        return True


class LogReader:
    """Reads lines of a job. Every replica of history may."""

    def __init__(self, store: RankLogs) -> None:
        self._store = store

    async def newest_round(self, job: str) -> int | None:
        """The last round with output."""
        return max(await self._store.rounds(job), default=None)

    async def rounds(self, job: str) -> list[int]:
        """The rounds with output."""
        return await self._store.rounds(job)

    async def indexes(self, job: str, round: int) -> list[LogIndex]:
        """The index of a round: what each node has sent."""
        return await self._store.indexes(job, round)

    async def page(self, query: LogQuery, place: LogPlace, limit: int) -> LinePage:
        """The next lines; `BadRegexError` for an expression that is none or takes too long.

        Lines of a page are sorted by time. Pages follow each other as pieces have arrived.
        """
        # A search looks at more than it gives.
        most = limit if query.regex is None else _LOOKED_AT * limit
        read = await self._read(query, place, most)
        matches, next_, is_end = read.matches, read.next, read.is_end
        if query.regex is not None:
            texts = [line.text for _, line in matches]
            places = await matching(query.regex, texts) if texts else set()
            matches = [one for at, one in enumerate(matches) if at in places]
        if len(matches) > limit:
            matches, is_end = matches[:limit], False
            next_ = matches[-1][0]
        return LinePage(merged(line for _, line in matches), next_, is_end, read.scanned_bytes)

    async def _read(self, query: LogQuery, place: LogPlace, most: int) -> _Read:
        """Lines up to `most`, each with the place behind it."""
        once, read = SentOnce(), _Read(next=place)
        since_us = None if query.since_us is None else max(0, query.since_us - _SKEW_US)
        while True:
            page = await self._store.read(
                query.selection, read.next.after, since_us=since_us, most_bytes=_FETCH_BYTES
            )
            for stored in page.pieces:
                if not read.take(stored, once, query, most):
                    return read
            if page.is_end or page.after > read.next.after:
                read.next = LogPlace(max(page.after, read.next.after))
            read.is_end = page.is_end
            if page.is_end or read.scanned_bytes >= SCANNED_BYTES_MOST:
                return read


def world_of(indexes: list[LogIndex]) -> int:
    """How many ranks have written anything, as far as the highest of them tells."""
    files: Iterator[SentLogFile] = (file for index in indexes for file in index.files)
    return max((file.rank + 1 for file in files), default=1)
