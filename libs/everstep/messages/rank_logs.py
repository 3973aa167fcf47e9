"""The output of ranks on its way into the log store: pieces, and an index of each node.

Neither is a fact: a piece is bytes with a header, and an index is replaced by the next one.
"""

from typing import Annotated, Literal

import msgspec

from everstep.messages.base import Count, Name, Part

LogStream = Literal["stdout", "stderr"]
PIECE_BYTES = 256 * 1024
"""The most bytes of a file in one piece."""
LARGEST_PIECE_BYTES = 1024 * 1024
"""The most that a reader unpacks: masked secrets may make a piece longer."""
_TIMES_MOST = 4096

Micros = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
"""A wall clock in microseconds since 1970, UTC: shown to people, never compared with our own."""


class LogHeader(Part, frozen=True, kw_only=True):
    """Where a piece belongs in its file. The subject has job, round, node, rank and stream."""

    file: Name
    """The incarnation of the file: another one after the file was truncated or replaced."""
    offset: Count
    """The place in the file at which the piece begins."""
    size: Count
    """How many bytes of the file the piece covers; with masked secrets its text has another
    length."""
    line: Count
    """The number of the piece's first line in the file, from 0."""
    times: Annotated[tuple[tuple[Count, Micros], ...], msgspec.Meta(max_length=_TIMES_MOST)] = ()
    """(n, time): the lines before the n-th of this piece were in the file at that time."""
    is_open: bool = False
    """The last line continues in the next piece, or has no end yet."""


class LogPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Some output of one rank."""

    job: str
    round: int
    node: str
    rank: int
    stream: LogStream
    header: LogHeader
    data: bytes


class SentLogFile(Part, frozen=True, kw_only=True):
    """How much of one file of one rank is in the store."""

    rank: Count
    stream: LogStream
    file: Name
    size: Count = 0
    """The length of the file when the node last looked."""
    sent: Count = 0
    """How many bytes of the file were sent; the rest is on the node."""
    lines: Count = 0
    lost: Count = 0
    """Bytes that the script truncated before they were sent."""
    first_us: Micros | None = None
    last_us: Micros | None = None
    is_over: bool = False
    """The rank has ended, and all of it was sent."""


class LogIndex(Part, frozen=True, kw_only=True):
    """What one node has sent of one round."""

    job: Name
    round: Count
    node: Name
    at_us: Micros
    files: tuple[SentLogFile, ...] = ()
