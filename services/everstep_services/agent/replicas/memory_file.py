"""Files in memory that stay mapped: to map one takes longer than to send it."""

import contextlib
import mmap
import os
import weakref
from pathlib import Path

from everstep.evidence.files import open_regular
from everstep_services.agent.replicas.transfer.protocol import ReplicaError

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14: Python has no name for it."""


class MemoryFile:
    """A file that is written from beginning to end, again and again.

    The first time not through a mapping: that would take twice as long, and without free memory it
    would kill the process instead of raising an error.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        if path.exists() and path.stat().st_size > size_bytes:
            path.unlink()  # shortening it would kill processes that have it mapped
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size_bytes)
        self._mapped: mmap.mmap | None = None
        self._room = bytearray()

    def room(self, start: int, size: int) -> memoryview:
        """A buffer for the next bytes, which are then passed to `wrote`."""
        if self._mapped is not None:
            return memoryview(self._mapped)[start : start + size]
        if len(self._room) < size:
            self._room = bytearray(size)
        return memoryview(self._room)[:size]

    def wrote(self, start: int, piece: memoryview) -> None:
        """The buffer is filled. OSError when there is no memory for it."""
        at = 0
        while self._mapped is None and at < len(piece):
            at += os.pwrite(self._file, piece[at:], start + at)
        if start + len(piece) == self.size_bytes:
            self.close()

    def begin_again(self, path: Path) -> None:
        """Write the file once more; it may have another name."""
        if self._close.alive or self._mapped is not None:
            return
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), self.size_bytes)
        with contextlib.suppress(OSError):  # an older kernel maps one page after the other later
            self._mapped.madvise(_POPULATE_WRITE)

    def close(self) -> None:
        """The file is full, or will not be filled."""
        self._close()
        self._room = bytearray()


class MappedFiles:
    """Mappings of files that others overwrite in place."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, mmap.mmap]] = {}

    def of(self, path: Path, size_bytes: int) -> memoryview:
        """The first bytes of a file. A mapping of a replaced file is dropped."""
        with open_regular(path) as file:
            inode = os.fstat(file.fileno()).st_ino
            mapped = self._known.get(path)
            if mapped is None or mapped[0] != inode or len(mapped[1]) < size_bytes:
                mapped = inode, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._known[path] = mapped
        if len(mapped[1]) < size_bytes:
            raise ReplicaError(f"{path} is shorter than its index says", "torn")
        return memoryview(mapped[1])[:size_bytes]
