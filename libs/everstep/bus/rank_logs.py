"""The log store: the output of ranks as messages of a stream, which is its own index (ADR-0074).

A piece has the subject `es.log.<job>.<round>.<node>.<rank>.<stream>`: the server separates jobs by
it, and finds the pieces of a rank, of a round or of a time without a consumer.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import msgspec
import zstandard

from everstep import subjects
from everstep.bus.jetstream import JetStream, Stored
from everstep.bus.ports import LogPage, LogScope, StoredPiece
from everstep.bus.topology import LOG_INDEX_STREAM, LOGS_STREAM
from everstep.ids import id_from
from everstep.messages.rank_logs import (
    LARGEST_PIECE_BYTES,
    LogHeader,
    LogIndex,
    LogPiece,
    LogStream,
)

HEADER = "Everstep-Log"
_BATCH = 256
_INDEXES_AT_ONCE = 512
_HEADERS = msgspec.json.Decoder(LogHeader)
_INDEXES = msgspec.json.Decoder(LogIndex)
_STREAMS: tuple[str, ...] = get_args(LogStream)


class NatsRankLogs:
    """See `everstep.bus.ports.RankLogs`."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream

    async def put(self, piece: LogPiece) -> None:
        subject = subjects.log(piece.job, piece.round, piece.node, piece.rank, piece.stream)
        data = await asyncio.to_thread(zstandard.compress, piece.data)
        header = piece.header
        headers = {
            HEADER: msgspec.json.encode(header).decode(),
            # The file's id is random, and a refusal that tells the newest message's does not tell
            # it (ADR-0083): so nobody else can use up the id of the next piece.
            "Nats-Msg-Id": id_from(header.file, str(header.offset), str(header.size)),
        }
        await self._jetstream.publish(subject, data, headers)

    async def put_index(self, index: LogIndex) -> None:
        subject = subjects.log_index(index.job, index.round, index.node)
        await self._jetstream.publish(subject, msgspec.json.encode(index))

    async def read(
        self, wanted: LogScope, after: int, *, since_us: int | None, most_bytes: int
    ) -> LogPage:
        subject = subjects.log(wanted.job, wanted.round, wanted.node, wanted.rank, wanted.stream)
        body: dict[str, Any] = {"next_by_subj": subject, "batch": _BATCH, "max_bytes": most_bytes}
        if since_us is not None and not after:
            # By integers: a float rounds the last microsecond of the year 9999 up.
            since = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=since_us)
            body["start_time"] = since.isoformat()
        else:
            body["seq"] = after + 1
        series = await self._jetstream.several(LOGS_STREAM, body)
        pieces = await asyncio.to_thread(_pieces, series.messages)
        last = series.messages[-1].sequence if series.messages else after
        return LogPage(
            pieces, last, is_end=not series.pending, unreadable=len(series.messages) - len(pieces)
        )

    async def rounds(self, job: str) -> list[int]:
        names = await self._subjects(subjects.log_index(job))
        return sorted({int(name.split(".")[3]) for name in names})

    async def indexes(self, job: str, round: int) -> list[LogIndex]:
        names = sorted(await self._subjects(subjects.log_index(job, round)))
        indexes: list[LogIndex] = []
        for begin in range(0, len(names), _INDEXES_AT_ONCE):
            wanted = names[begin : begin + _INDEXES_AT_ONCE]
            body = {"multi_last": wanted, "batch": len(wanted)}
            series = await self._jetstream.several(LOG_INDEX_STREAM, body)
            indexes += [index for stored in series.messages if (index := _index(stored))]
        return indexes

    async def remove(self, job: str, round: int | None = None) -> None:
        for stream, subject in (
            (LOGS_STREAM, subjects.log(job, round)),
            (LOG_INDEX_STREAM, subjects.log_index(job, round)),
        ):
            await self._jetstream.api(f"STREAM.PURGE.{stream}", {"filter": subject})

    async def _subjects(self, pattern: str) -> Mapping[str, int]:
        counts: dict[str, int] = {}
        while True:
            body = {"subjects_filter": pattern, "offset": len(counts)}
            answer = await self._jetstream.api(f"STREAM.INFO.{LOG_INDEX_STREAM}", body)
            page = answer["state"].get("subjects") or {}
            counts |= page
            if not page or len(counts) >= answer.get("total", 0):
                return counts


def _pieces(messages: Sequence[Stored]) -> list[StoredPiece]:
    read = (_piece(stored) for stored in messages)
    return [piece for piece in read if piece is not None]


def _piece(stored: Stored) -> StoredPiece | None:
    """The piece in a message; None for one that no agent of ours has sent."""
    try:
        _, _, job, round, node, rank, stream = stored.headers["Nats-Subject"].split(".")
        header = _HEADERS.decode(stored.headers[HEADER])
        size = zstandard.frame_content_size(stored.data)
        if stream not in _STREAMS or not 0 <= size <= LARGEST_PIECE_BYTES:
            return None
        data = zstandard.ZstdDecompressor().decompress(stored.data, allow_extra_data=False)
        piece = LogPiece(
            job=job, round=int(round), node=node, rank=int(rank),
            stream="stdout" if stream == "stdout" else "stderr", header=header, data=data,
        )  # fmt: skip
    except (KeyError, ValueError, msgspec.DecodeError, zstandard.ZstdError):
        return None
    return StoredPiece(stored.sequence, piece)


def _index(stored: Stored) -> LogIndex | None:
    try:
        index = _INDEXES.decode(stored.data)
        job, number, node = stored.headers["Nats-Subject"].split(".")[2:]
    except (KeyError, ValueError, msgspec.DecodeError):
        return None
    is_its = (index.job, str(index.round), index.node) == (job, number, node)
    return index if is_its else None
