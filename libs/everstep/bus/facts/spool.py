"""Facts on this disk until the stream has them: append-only, fsync'd, bounded.

A spool is a folder of numbered segments. A record is its length, its CRC and its bytes.
`acked` holds a position before which the stream has every record. It may lag, because sending
twice is harmless; it never leads.
"""

import contextlib
import errno
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.bus.errors import SpoolBusyError, SpoolFullError, SpoolWriteError
from everstep.evidence.files import read_regular

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
_ACKED = struct.Struct("<QQI")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The start of a record: its segment and the offset in it."""

    segment: int
    offset: int


class Spool:
    """Blocks, and may be used by one thread at a time. Use `open`, and `close` it."""

    def __init__(self, folder: Path, *, max_bytes: int, segment_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._sizes: dict[int, int] = {}  # of every segment on disk, the last being written
        self._acked = Position(1, 0)
        self._fd = -1
        self._lock = -1

    @classmethod
    def open(
        cls, folder: Path, *, max_bytes: int = 256 << 20, segment_bytes: int = 8 << 20
    ) -> "Spool":
        """Lock the folder and recover the facts in it."""
        spool = cls(folder, max_bytes=max_bytes, segment_bytes=segment_bytes)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            spool._take_lock()
            spool._recover()
        except OSError as error:
            spool.close()
            raise SpoolWriteError(f"the spool {folder} cannot be used: {error.strerror}") from error
        except SpoolBusyError:
            spool.close()
            raise
        return spool

    @property
    def pending_bytes(self) -> int:
        """Bytes on disk that the stream has not acknowledged."""
        return sum(self._sizes.values()) - self._acked.offset

    @property
    def rejected(self) -> Path:
        """The file with records that the stream will never accept."""
        return self._folder / "rejected"

    @property
    def acked(self) -> Position:
        return self._acked

    @property
    def end(self) -> Position:
        last = max(self._sizes)
        return Position(last, self._sizes[last])

    def append(self, records: Sequence[bytes]) -> None:
        """Store all records or none. On return they are on the disk.

        `SpoolFullError` when they would not fit, `SpoolWriteError` when the disk refuses;
        the spool stays usable after both.
        """
        data = b"".join(
            part
            for record in records
            for part in (_HEADER.pack(len(record), zlib.crc32(record)), record)
        )
        if self.pending_bytes + len(data) > self._max_bytes:
            raise SpoolFullError(
                f"the spool {self._folder} is full: {self.pending_bytes} of {self._max_bytes} "
                f"bytes wait for the bus. Bring the bus back, or raise spool_max_bytes in [bus]"
            )
        last = max(self._sizes)
        try:
            if self._sizes[last] >= self._segment_bytes:
                last = self._start_segment(last + 1)
            _write_all(self._fd, data, self._sizes[last])
            os.fsync(self._fd)
        except OSError as error:
            self._cut_back(last)
            raise SpoolWriteError(
                f"the spool {self._folder} cannot be written: "
                f"{os.strerror(error.errno or errno.EIO)}. Free space there, or set spool_dir "
                f"in [bus] to another disk"
            ) from error
        self._sizes[last] += len(data)

    def read(self, start: Position, most: int) -> tuple[list[bytes], Position]:
        """Return up to `most` records from `start`, and the position after them."""
        start = self._skip_finished(start)
        if start.offset >= self._sizes[start.segment]:
            return [], start
        with self._path(start.segment).open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), _READ_BYTES, start.offset)
            if len(data) >= 4:  # a record may be longer than one read
                need = _HEADER.size + int.from_bytes(data[:4], "little")
                if need > len(data):
                    data = os.pread(file.fileno(), need, start.offset)
        limit = self._sizes[start.segment] - start.offset
        records: list[bytes] = []
        used = 0
        for record, end in _records(data[:limit]):
            records.append(record)
            used = end
            if len(records) == most:
                break
        return records, Position(start.segment, start.offset + used)

    def acknowledge(self, upto: Position) -> None:
        """Delete everything before `upto`, which the stream has stored."""
        if upto <= self._acked:
            return
        self._acked = upto
        body = struct.pack("<QQ", upto.segment, upto.offset)
        with (self._folder / "acked").open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), body + zlib.crc32(body).to_bytes(4, "little"), 0)
        self._forget_before(upto.segment)

    def set_aside(self, records: Sequence[bytes]) -> None:
        """Write records that the stream will never accept to the file `rejected`, for people."""
        with self.rejected.open("ab") as file:
            file.writelines(record + b"\n" for record in records)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    # -- opening ---------------------------------------------------------------------------

    def _take_lock(self) -> None:
        path = self._folder / "lock"
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise SpoolBusyError(
                f"the spool {self._folder} is in use by process {holder}: "
                f"give each process its own spool_dir in [bus]"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _recover(self) -> None:
        numbers = sorted(int(path.stem) for path in self._folder.glob("*.seg"))
        for number in numbers:
            self._sizes[number] = self._checked_size(number, is_last=number == numbers[-1])
        if numbers:
            self._fd = self._open_segment(numbers[-1])
        else:
            self._start_segment(1)
        self._acked = self._read_acked()
        self._forget_before(self._acked.segment)  # the process may have died in between

    def _checked_size(self, number: int, *, is_last: bool) -> int:
        """Return the bytes of whole records; cut off and keep aside the bytes after them."""
        path = self._path(number)
        data = read_regular(path)
        good = 0
        for _, end in _records(data):
            good = end
        if good < len(data):
            if not is_last or _has_more(data, good):
                aside = path.with_suffix(".damaged")
                aside.write_bytes(data[good:])
                log.error("spool_damaged path=%s at=%d kept=%s", path, good, aside)
            else:
                log.warning("spool_torn_tail path=%s bytes=%d", path, len(data) - good)
            os.truncate(path, good)
        return good

    def _read_acked(self) -> Position:
        first = min(self._sizes)
        path = self._folder / "acked"
        if not path.exists():
            path.write_bytes(b"")
        data = read_regular(path)
        if len(data) == _ACKED.size and zlib.crc32(data[:16]) == int.from_bytes(
            data[16:], "little"
        ):
            segment, offset, _ = _ACKED.unpack(data)
            if segment in self._sizes and offset <= self._sizes[segment]:
                return Position(segment, offset)
        return Position(first, 0)

    # -- segments --------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:010d}.seg"

    def _open_segment(self, number: int) -> int:
        return os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _start_segment(self, number: int) -> int:
        """Start a new segment; if that fails, the previous one stays in use."""
        descriptor = self._open_segment(number)
        try:
            self._sync_folder()  # else a power cut may forget the new segment's name
        except OSError:
            os.close(descriptor)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = descriptor
        self._sizes[number] = 0
        return number

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _forget_before(self, segment: int) -> None:
        for number in [n for n in self._sizes if n < segment]:
            self._path(number).unlink(missing_ok=True)
            del self._sizes[number]

    def _cut_back(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._sizes[number])

    def _skip_finished(self, start: Position) -> Position:
        while start.offset >= self._sizes.get(start.segment, 0) and start.segment < max(
            self._sizes
        ):
            start = Position(start.segment + 1, 0)
        return start


def unsent_bytes(folder: Path) -> int:
    """Bytes in a spool that the stream has not acknowledged, without opening or locking it."""
    sizes = {int(path.stem): path.stat().st_size for path in folder.glob("*.seg")}
    try:
        segment, offset, _ = _ACKED.unpack(read_regular(folder / "acked"))
    except (OSError, struct.error):
        segment, offset = 0, 0
    held = sum(size for number, size in sizes.items() if number >= segment)
    return max(0, held - int(offset))


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield each whole record and the offset after it, up to the first incomplete record."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, crc = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + length
        record = data[at + _HEADER.size : end]
        if end > len(data) or length == 0 or zlib.crc32(record) != crc:
            return
        yield record, end
        at = end


def _has_more(data: bytes, at: int) -> bool:
    """Whether a bad record is followed by more than its own length: damage, not a torn tail."""
    if at + _HEADER.size > len(data):
        return False
    length, _ = _HEADER.unpack_from(data, at)
    return bool(length > 0 and at + _HEADER.size + length < len(data))


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
