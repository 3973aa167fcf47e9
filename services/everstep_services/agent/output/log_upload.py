"""Sends the output of ranks to the log store, from their files; training waits for none of it.

    begins(order)  ─▶ two cursors a rank ─▶ every 0.25 s: look at lengths, note the times
                                            what is due is read, masked, sent, acknowledged
    ends()         ─▶ what the files hold now is all: it goes out while later rounds run
    another agent of this node and job finds `.upload.json` of rounds that no agent has finished

The files are the queue. While the store is away or refuses, cursors stay where they are.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.backoff import Backoff
from everstep.bus.errors import BusError
from everstep.bus.ports import RankLogs
from everstep.clock import Clock
from everstep.evidence.files import read_regular
from everstep.messages import StartRanks
from everstep.messages.rank_logs import PIECE_BYTES, LogIndex, LogPiece, LogStream, SentLogFile
from everstep.observe.redaction import redact
from everstep_services.agent.output.log_files import LogFiles, LogOwner
from everstep_services.agent.output.upload_cursor import Cut, UploadCursor, resumed

log = logging.getLogger(__name__)

POSITION_FILE = ".upload.json"
_LOOK_EVERY_S = 0.25
_INDEX_EVERY_S = 5.0
_NODES_A_SECOND = 64
"""A job of this many more nodes sends a second less often."""
_BURST_S = 2.0
_AGAIN_FIRST_S, _AGAIN_MOST_S = 0.5, 15.0
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_STREAMS: tuple[LogStream, ...] = ("stdout", "stderr")
_POSITIONS = msgspec.json.Decoder(tuple[SentLogFile, ...])
_OWNERS = msgspec.json.Decoder(LogOwner)


@dataclass(slots=True)
class OpenFile:
    """A file of a rank, kept open: it is read to its end even if another takes its name."""

    path: Path
    cursor: UploadCursor
    fd: int = -1

    def look(self, now_us: int) -> None:
        """Notice how long it is, and whether another file has its name."""
        is_over = self.cursor.is_over  # before the length: what is written until then counts
        with contextlib.suppress(OSError):
            if self.fd < 0:
                self._open()
            about = os.fstat(self.fd)
            self.cursor.looked(about.st_size, now_us, new_name)
            if self.cursor.offset >= about.st_size and self._is_replaced(about):
                self.close()
                self._open()
                self.cursor.begin_again(new_name())
                self.cursor.looked(os.fstat(self.fd).st_size, now_us, new_name)
        self.cursor.is_whole = is_over

    def read(self) -> bytes:
        """Up to one piece behind what was sent; nothing when it cannot be read."""
        try:
            return os.pread(self.fd, PIECE_BYTES, self.cursor.offset)
        except OSError as error:
            log.debug("log_not_read path=%s error=%s", self.path, error)
            return b""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _open(self) -> None:
        fd = os.open(self.path, _READ)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(self.path)
        self.fd = fd

    def _is_replaced(self, about: os.stat_result) -> bool:
        there = os.stat(self.path, follow_symlinks=False)
        return (there.st_dev, there.st_ino) != (about.st_dev, about.st_ino)


@dataclass(slots=True)
class RoundUpload:
    """The files of this node's ranks in one round."""

    round: int
    every_s: float
    files: list[OpenFile] = field(default_factory=list)
    index_at: float = float("-inf")
    index: LogIndex | None = None
    """The last one that the store has."""

    @property
    def is_done(self) -> bool:
        return all(file.cursor.is_done for file in self.files)


class LogUploader:
    """Sends the output of one agent's ranks. Everything that touches a disk runs in a thread."""

    def __init__(
        self, job: str, node: str, logs: LogFiles, store: RankLogs, clock: Clock, bytes_per_s: int
    ) -> None:
        self._job, self._node = job, node
        self._logs = logs
        self._store = store
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._may_send = _BURST_S * bytes_per_s
        self._refilled_at = clock.now()
        self._rounds: dict[int, RoundUpload] = {}
        self._is_ending = asyncio.Event()
        self._trouble = ""
        self._backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_MOST_S)

    def begins(self, order: StartRanks) -> None:
        """Follow the ranks of this round, from where their output begins."""
        upload = RoundUpload(order.round, 1.0 + order.slots / _NODES_A_SECOND)
        for rank in range(order.first_rank, order.first_rank + order.ranks):
            for stream in _STREAMS:
                start = self._logs.start(order.round, rank, stream)
                cursor = UploadCursor(rank, stream, new_name(), offset=start)
                upload.files.append(OpenFile(self._logs.file(order.round, rank, stream), cursor))
        self._end(self._rounds.pop(order.round, None))
        self._rounds[order.round] = upload

    def ends(self) -> None:
        """No rank runs any more: what the files hold now is all."""
        for upload in self._rounds.values():
            self._end(upload)

    def _end(self, upload: RoundUpload | None) -> None:
        for file in () if upload is None else upload.files:
            file.cursor.is_over = True

    async def upload_for_ever(self) -> None:
        """Send what there is, until the end and all of it is sent."""
        await self._take_over()
        while not (self._is_ending.is_set() and not self._rounds):
            try:
                is_more = await self._turn()
                if self._trouble:
                    log.info("logs_sent_again")
                    self._trouble = ""
                self._backoff.reset()
                wait_s = 0.0 if is_more else _LOOK_EVERY_S
            except (BusError, TimeoutError) as error:
                wait_s = self._backoff.failed()
                self._note(str(error) or type(error).__name__)
            await self._clock.sleep(wait_s)

    async def finish(self, within_s: float) -> None:
        """The ranks have ended: send the rest, for some seconds at most."""
        self.ends()
        self._is_ending.set()
        deadline = self._clock.now() + within_s
        while self._rounds and self._clock.now() < deadline:
            await self._clock.sleep(_LOOK_EVERY_S / 5)
        for upload in self._rounds.values():
            waiting = sum(file.cursor.size - file.cursor.offset for file in upload.files)
            log.warning("logs_stay_on_the_node round=%d bytes=%d", upload.round, waiting)

    async def _turn(self) -> bool:
        """Look at all files, and send one piece of each that is due; True when more is due."""
        is_more = False
        self._refill()
        try:
            for upload in list(self._rounds.values()):
                now_us = _micros(self._clock)
                await asyncio.to_thread(_look, upload, now_us)
                for file in upload.files:
                    if self._may_send <= 0:
                        break
                    is_more |= await self._send_some(upload, file)
                await self._tell(upload)
        finally:
            # Also when the store refused: what it took meanwhile need not be sent again.
            for upload in list(self._rounds.values()):
                await asyncio.to_thread(self._note_positions, upload)
        for number, upload in list(self._rounds.items()):
            if upload.is_done and upload.index is not None and self._rounds[number] is upload:
                del self._rounds[number]
                await asyncio.to_thread(_close, upload)
        return is_more and self._may_send > 0

    def _refill(self) -> None:
        now, most = self._clock.now(), _BURST_S * self._bytes_per_s
        since_s, self._refilled_at = now - self._refilled_at, now
        self._may_send = min(self._may_send + since_s * self._bytes_per_s, most)

    async def _send_some(self, upload: RoundUpload, file: OpenFile) -> bool:
        cursor = file.cursor
        if not cursor.is_due(self._clock.now(), upload.every_s):
            return False
        data = await asyncio.to_thread(file.read)
        cut = cursor.cut(data, self._clock.now())
        if cut is None:
            return False
        piece = await asyncio.to_thread(self._piece, upload.round, cursor, cut, data)
        await self._store.put(piece)
        cursor.sent(cut, self._clock.now())
        self._may_send -= cut.taken
        return cursor.is_due(self._clock.now(), upload.every_s)

    def _piece(self, round: int, cursor: UploadCursor, cut: Cut, data: bytes) -> LogPiece:
        text = data[: cut.taken].decode("utf-8", "surrogateescape")
        masked = redact(text).encode("utf-8", "surrogateescape")
        return LogPiece(
            job=self._job, round=round, node=self._node, rank=cursor.rank, stream=cursor.stream,
            header=cut.header, data=masked,
        )  # fmt: skip

    async def _tell(self, upload: RoundUpload) -> None:
        """Replace the index when it is old, or now when everything was sent."""
        files = tuple(file.cursor.entry() for file in upload.files if file.cursor.size)
        now = self._clock.now()
        is_same = upload.index is not None and upload.index.files == files
        if is_same or (now - upload.index_at < _INDEX_EVERY_S and not upload.is_done):
            return
        index = LogIndex(
            job=self._job, round=upload.round, node=self._node, at_us=_micros(self._clock),
            files=files,
        )  # fmt: skip
        await self._store.put_index(index)
        upload.index, upload.index_at = index, now

    # -- over the death of an agent ------------------------------------------------------------

    def _note_positions(self, upload: RoundUpload) -> None:
        """Write next to the files how far they were sent; a full disk only costs a second copy."""
        for folder in {file.path.parent for file in upload.files}:
            entries = tuple(
                file.cursor.entry() for file in upload.files if file.path.parent == folder
            )
            with contextlib.suppress(OSError):
                _write(folder / POSITION_FILE, msgspec.json.encode(entries))

    async def _take_over(self) -> None:
        """Go on with rounds of this node that another agent of this job could not finish."""
        for upload in await asyncio.to_thread(self._left):
            self._rounds.setdefault(upload.round, upload)

    def _left(self) -> list[RoundUpload]:
        uploads: dict[int, RoundUpload] = {}
        for path in sorted(self._logs.of_job.glob(f"round-*/rank-*/{POSITION_FILE}")):
            try:
                about = _OWNERS.decode(read_regular(path.parent / "about.json"))
                entries = _POSITIONS.decode(read_regular(path))
            except (OSError, msgspec.DecodeError, ValueError):
                continue
            if about.node != self._node or all(entry.is_over for entry in entries):
                continue
            upload = uploads.setdefault(about.round, RoundUpload(about.round, 0.0))
            upload.files += [
                OpenFile(path.parent / entry.stream, resumed(entry, is_over=True))
                for entry in entries
            ]
        return list(uploads.values())

    def _note(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("logs_wait_on_the_node error=%s", trouble)
        self._trouble = trouble


def new_name() -> str:
    """The name of a file's contents: nobody can guess it, so nobody can use it up."""
    return secrets.token_hex(8)


def _look(upload: RoundUpload, now_us: int) -> None:
    for file in upload.files:
        file.look(now_us)


def _close(upload: RoundUpload) -> None:
    for file in upload.files:
        file.close()


def _write(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        if read_regular(path) == data:
            return
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)


def _micros(clock: Clock) -> int:
    return int(clock.wall().timestamp() * 1_000_000)
