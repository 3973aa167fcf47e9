"""Files that the writer process writes for NVRx's savers, with a record of their hashes."""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from everstep.evidence.files import open_regular, read_regular
from everstep.hashing import Hasher
from trainer_sdk.checkpoint.file_saver import FileContent, FileSaver
from trainer_sdk.checkpoint.image_folder import put_durably
from trainer_sdk.checkpoint.save.buffers import MOST_BUFFERS
from trainer_sdk.checkpoint.save.request import SaveHandle

_READ_BYTES = 8 << 20
_opening = threading.Lock()
_saver: FileSaver | None = None


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Size and hash of a file, as they were when it was written."""

    size_bytes: int
    hash: str


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that is being written."""

    path: str
    handle: SaveHandle

    def record(self) -> FileRecord:
        """Wait until the file is durable; raises `SaveError` or `OSError` if it is not."""
        if not self.handle.wait():
            raise self.handle.error or OSError(f"{self.path}: {self.handle.reason}")
        return FileRecord(size_bytes=os.stat(self.path).st_size, hash=self.handle.file_hash)


class DamagedFileError(RuntimeError):
    """A file is not what was written."""


def write(content: FileContent, path: "str | os.PathLike[str]") -> WrittenFile:
    """Copy the content now, and write it in the writer process."""
    global _saver  # noqa: PLW0603 - a process has a single one
    with _opening:
        if _saver is None:
            _saver = FileSaver(in_flight=MOST_BUFFERS)
    _saver.maybe_finalize()
    where = os.fspath(path)
    return WrittenFile(where, _saver.schedule_content(content, where, is_hashed=True))


def put_records(path: Path, records: Mapping[str, FileRecord]) -> None:
    """Write the records of files, durably."""
    put_durably(path, msgspec.json.encode(records))


def records_in(paths: Sequence[Path]) -> dict[str, FileRecord]:
    """The records in these files; a file that is not a record is ignored."""
    records: dict[str, FileRecord] = {}
    for path in paths:
        try:
            records |= msgspec.json.decode(read_regular(path), type=dict[str, FileRecord])
        except (OSError, msgspec.DecodeError):
            continue
    return records


def check(path: Path, record: FileRecord) -> None:
    """Raise `DamagedFileError` if the file is not what was written."""
    hasher, size = Hasher(), 0
    with open_regular(path) as file:
        while octets := file.read(_READ_BYTES):
            hasher.update(octets)
            size += len(octets)
    if (size, hasher.hexdigest()) != (record.size_bytes, record.hash):
        raise DamagedFileError(
            f"{path} is not what was saved: it has {size} bytes with the hash "
            f"{hasher.hexdigest()}, and {record.size_bytes} with {record.hash} were written; "
            "restore another checkpoint"
        )


def _forget() -> None:
    """Forget the parent's saver in a forked child."""
    global _saver, _opening
    _saver, _opening = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
