"""How much of one file of a rank is in the log store, and what is sent next; pure.

The file on the node is the queue: nothing of it waits in memory, and a store that is away or slow
only leaves the cursor behind. Lines are sent whole where that is possible, and the times at which
the file grew are remembered from before they are sent.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.messages.rank_logs import PIECE_BYTES, LogHeader, LogStream, SentLogFile

MARKS_MOST = 2048
"""Beyond it every second time is forgotten: lines are then known to fewer moments."""
HOLD_S = 5.0
"""How long a line without an end waits for it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The next piece: its header, and how many of the bytes that were read it takes."""

    header: LogHeader
    taken: int
    lines: int


@dataclass(slots=True)
class UploadCursor:
    """One file. `file` names its contents: a file that was truncated or replaced has another."""

    rank: int
    stream: LogStream
    file: str
    offset: int = 0
    """Every byte before it is in the store."""
    line: int = 0
    lost: int = 0
    size: int = 0
    is_over: bool = False
    """The rank has ended: what the file holds now is all."""
    is_whole: bool = False
    """Its length was looked at after that."""
    first_us: int | None = None
    last_us: int | None = None
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(length, time): the file had this length at that time."""
    _waits_since: float | None = None
    _sent_at: float = float("-inf")

    def looked(self, size: int, now_us: int, new_name: Callable[[], str]) -> None:
        """The file has this length now. A shorter one was truncated: its contents are new."""
        if size < max(self.size, self.offset):
            self.begin_again(new_name())
        if size > self.size:
            self.marks.append((size, now_us))
            if len(self.marks) > MARKS_MOST:
                self.marks = self.marks[1::2]
        self.size = size

    def begin_again(self, file: str) -> None:
        """Another file has this name now; what was not sent of the one before is lost."""
        self.lost += self.size - self.offset
        self.file, self.offset, self.line, self.size = file, 0, 0, 0
        self.marks, self._waits_since = [], None

    def is_due(self, now: float, every_s: float) -> bool:
        """Whether there is a reason to read the file now."""
        waiting = self.size - self.offset
        if waiting <= 0:
            return False
        return waiting >= PIECE_BYTES or self.is_over or now - self._sent_at >= every_s

    def cut(self, data: bytes, now: float) -> Cut | None:
        """What to send of `data`, which begins at the offset; None while a line has no end."""
        data = data[:PIECE_BYTES]
        taken = data.rfind(b"\n") + 1
        is_rest = self.is_over and self.offset + len(data) >= self.size
        if is_rest:
            taken = len(data)
        elif not taken and len(data) == PIECE_BYTES:
            taken = _whole_characters(data)
        elif not taken:
            since = self._waits_since = self._waits_since if self._waits_since is not None else now
            taken = len(data) if now - since >= HOLD_S else 0
        if not taken:
            return None
        piece = data[:taken]
        lines = piece.count(b"\n")
        header = LogHeader(
            file=self.file, offset=self.offset, size=taken, line=self.line,
            times=self._times(piece), is_open=not piece.endswith(b"\n"),
        )  # fmt: skip
        return Cut(header, taken, lines)

    def _times(self, piece: bytes) -> tuple[tuple[int, int], ...]:
        begin = bisect_left(self.marks, (self.offset + 1, 0))
        times: list[tuple[int, int]] = []
        counted = at = 0
        for length, time_us in self.marks[begin:]:
            end = min(length - self.offset, len(piece))
            counted += piece.count(b"\n", at, end)
            at = end
            if end == len(piece):
                times.append((counted + 1, time_us))  # the last line may have no end
                break
            if not times or counted > times[-1][0]:
                times.append((counted, time_us))
        return tuple(times)

    def sent(self, cut: Cut, now: float) -> None:
        """The store has acknowledged it."""
        self.offset += cut.taken
        self.line += cut.lines
        if cut.header.times:
            first, last = cut.header.times[0][1], cut.header.times[-1][1]
            self.first_us = first if self.first_us is None else self.first_us
            self.last_us = last
        done = bisect_left(self.marks, (self.offset, 0))
        del self.marks[: min(done, max(0, len(self.marks) - 1))]
        self._waits_since, self._sent_at = None, now

    @property
    def is_done(self) -> bool:
        """The rank has ended, and all of it was sent."""
        return self.is_whole and self.offset >= self.size

    def entry(self) -> SentLogFile:
        """What the index says about it."""
        return SentLogFile(
            rank=self.rank, stream=self.stream, file=self.file, size=self.size, sent=self.offset,
            lines=self.line, lost=self.lost, first_us=self.first_us, last_us=self.last_us,
            is_over=self.is_done,
        )  # fmt: skip


def resumed(entry: SentLogFile, *, is_over: bool) -> UploadCursor:
    """The cursor of an agent that has died, from what it left next to the file."""
    return UploadCursor(
        rank=entry.rank, stream=entry.stream, file=entry.file, offset=entry.sent,
        line=entry.lines, lost=entry.lost, first_us=entry.first_us, last_us=entry.last_us,
        is_over=is_over,
    )  # fmt: skip


def _whole_characters(data: bytes) -> int:
    """The length up to the last whole character of UTF-8; all of it where there is none."""
    end = len(data)
    for back in range(1, min(4, end) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return (end - back if back < length else end) or end
    return end
