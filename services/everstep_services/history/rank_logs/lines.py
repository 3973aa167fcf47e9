"""Lines of pieces of output, with their times; and NVRx's file of a cycle; pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from everstep.messages.rank_logs import LogPiece

LONGEST_LINE = 64 * 1024
"""A longer line is given in parts."""


@dataclass(frozen=True, slots=True)
class RankLine:
    """One line of one rank, or a part of a very long one."""

    round: int
    node: str
    rank: int
    stream: str
    number: int
    """Its place in the file, from 0."""
    at_us: int | None
    """When its node saw it, by that node's clock."""
    text: str
    is_partial: bool = False
    """The line goes on in the next one of this rank and stream."""


def lines_of(piece: LogPiece) -> Iterator[RankLine]:
    """The lines of a piece, in order. Bytes that are not UTF-8 are replaced."""
    header = piece.header
    ends = [count for count, _ in header.times]
    texts = piece.data.split(b"\n")
    if not texts[-1] and len(texts) > 1:
        texts.pop()
    for place, data in enumerate(texts):
        mark = min(bisect_right(ends, place), len(ends) - 1)
        at_us = header.times[mark][1] if ends else None
        is_last_open = header.is_open and place == len(texts) - 1
        text = data.decode("utf-8", "replace").removesuffix("\r")
        parts = [text[at : at + LONGEST_LINE] for at in range(0, len(text), LONGEST_LINE)] or [""]
        for part, following in pairwise([*parts, None]):
            yield RankLine(
                piece.round, piece.node, piece.rank, piece.stream, header.line + place, at_us,
                part or "", is_partial=following is not None or is_last_open,
            )  # fmt: skip


@dataclass(slots=True)
class SentOnce:
    """Skips what an agent sent a second time, since it died before it could note the first."""

    _reached: dict[tuple[str, int, str, str], tuple[int, int]] = field(default_factory=dict)

    def fresh(self, piece: LogPiece) -> Iterator[RankLine]:
        """The lines of a piece that were not there before."""
        header = piece.header
        key = (piece.node, piece.rank, piece.stream, header.file)
        offset, line = self._reached.get(key, (0, 0))
        end = header.offset + header.size
        if end <= offset:
            return
        next_line = header.line + piece.data.count(b"\n")
        self._reached[key] = (end, max(line, next_line))
        is_again = header.offset < offset
        for rank_line in lines_of(piece):
            if not is_again or rank_line.number >= line:
                yield rank_line


def merged(lines: Iterable[RankLine]) -> list[RankLine]:
    """Sorted by time; lines of one stream stay in order, whatever its node's clock did."""
    newest: dict[tuple[str, int, str], int] = {}
    keyed: list[tuple[int, RankLine]] = []
    for line in lines:
        key = (line.node, line.rank, line.stream)
        at_us = max(newest.get(key, 0), line.at_us or 0)
        newest[key] = at_us
        keyed.append((at_us, line))
    keyed.sort(key=lambda pair: pair[0])
    return [line for _, line in keyed]


def cycle_text(lines: Iterable[RankLine], world_size: int) -> str:
    """The lines as NVRx writes them into its file of a cycle: the padded rank, then the line."""
    width = len(str(max(world_size - 1, 0)))
    texts = []
    for line in lines:
        text = line.text.replace("\0", "<NUL>")
        texts.append(f"{line.rank:>{width}}: {text}\n")
    return "".join(texts)
