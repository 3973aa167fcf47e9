"""What REST says about the output of ranks in the log store."""

from datetime import datetime

from pydantic import Field

from everstep.messages.rank_logs import LogIndex
from everstep.store.times import from_us
from everstep_services.history.api.dto.answer import Answer
from everstep_services.history.rank_logs.lines import RankLine


class StoredLine(Answer):
    """One line of one rank."""

    round: int
    node: str
    rank: int
    stream: str
    number: int = Field(description="The number of the line in its file, from 0.")
    at: datetime | None = Field(description="When the node saw the line, by the node's clock.")
    text: str = Field(description="Without secrets; bytes that are not UTF-8 are replaced.")
    is_partial: bool
    """True if the line continues in the next one of this stream."""


class StoredLines(Answer):
    """Lines by time."""

    job: str
    round: int | None = Field(description="The round of these lines; null for all rounds.")
    items: list[StoredLine]
    next: str
    """Give it as `cursor` for what follows, also at the end: for what is written later."""
    is_end: bool = Field(description="True if there were no more lines at that moment.")
    scanned_bytes: int = Field(description="The bytes that were searched for this page.")


class StoredLogFile(Answer):
    """How much of the output of a rank is in the store."""

    node: str
    rank: int
    stream: str
    file: str
    """The id of the file; another one after the file was truncated or replaced."""
    bytes: int = Field(description="The length of the file when the node last looked.")
    stored_bytes: int = Field(description="The bytes that the store has; the rest is on the node.")
    lines: int
    lost_bytes: int = Field(description="The bytes that were truncated before they were sent.")
    first_at: datetime | None
    last_at: datetime | None
    is_whole: bool = Field(description="The rank has ended, and all of its output was sent.")


class StoredRound(Answer):
    """The index of a round: whose output is in the store, and how much of it."""

    job: str
    round: int
    is_whole: bool = Field(description="All of the output of these ranks was sent.")
    nodes: list[str]
    items: list[StoredLogFile]


class StoredRounds(Answer):
    """The rounds with output in the store."""

    job: str
    rounds: list[int]


def shown_line(line: RankLine) -> StoredLine:
    """A line as REST shows it."""
    return StoredLine(
        round=line.round, node=line.node, rank=line.rank, stream=line.stream, number=line.number,
        at=None if line.at_us is None else from_us(line.at_us), text=line.text,
        is_partial=line.is_partial,
    )  # fmt: skip


def shown_round(job: str, number: int, indexes: list[LogIndex]) -> StoredRound:
    """The indexes of all nodes of a round, as one."""
    files = [
        StoredLogFile(
            node=index.node, rank=file.rank, stream=file.stream, file=file.file, bytes=file.size,
            stored_bytes=file.sent, lines=file.lines, lost_bytes=file.lost,
            first_at=None if file.first_us is None else from_us(file.first_us),
            last_at=None if file.last_us is None else from_us(file.last_us),
            is_whole=file.is_over,
        )
        for index in indexes
        for file in index.files
    ]  # fmt: skip
    files.sort(key=lambda file: (file.rank, file.stream, file.node))
    return StoredRound(
        job=job, round=number, is_whole=all(file.is_whole for file in files),
        nodes=sorted({index.node for index in indexes}), items=files,
    )  # fmt: skip
