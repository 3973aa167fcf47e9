"""Files in memory, mapped once for many uses: to map one takes longer than to send it."""

import contextlib
import mmap
import os
import weakref
from pathlib import Path

from everstep_services.agent.replicas.protocol import ReplicaError

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14: Python has no name for it."""


class MemoryFile:
    """A file that is written from its beginning to its end, and then again and again.

    The first time not through a mapping: that would take twice as long, and be the death of the
    process instead of an error when there is no memory left.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        if path.exists() and path.stat().st_size > size_bytes:
            path.unlink()  # shortened, it would be the death of who has it mapped
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size_bytes)
        self._mapped: mmap.mmap | None = None
        self._room = bytearray()

    def room(self, start: int, size: int) -> memoryview:
        """To be filled, and then given to `wrote`."""
        if self._mapped is not None:
            return memoryview(self._mapped)[start : start + size]
        if len(self._room) < size:
            self._room = bytearray(size)
        return memoryview(self._room)[:size]

    def wrote(self, start: int, piece: memoryview) -> None:
        """It is filled. OSError when there is no memory for it."""
        at = 0
        while self._mapped is None and at < len(piece):
            at += os.pwrite(self._file, piece[at:], start + at)
        if start + len(piece) == self.size_bytes:
            self.close()

    def begin_again(self, path: Path) -> None:
        """From now on it is written for another time; the file may have another name."""
        if self._close.alive or self._mapped is not None:
            return
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), self.size_bytes)
        with contextlib.suppress(OSError):  # an older kernel: one page after the other, then
            self._mapped.madvise(_POPULATE_WRITE)

    def close(self) -> None:
        """It is full, or will not be."""
        self._close()
        self._room = bytearray()


class MappedFiles:
    """Files that others write again and again, in place."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, mmap.mmap]] = {}

    def of(self, path: Path, size_bytes: int) -> memoryview:
        """So many bytes of it. What it was before it was replaced is let go."""
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            known = self._known.get(path)
            if known is None or known[0] != inode or len(known[1]) < size_bytes:
                known = inode, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._known[path] = known
        if len(known[1]) < size_bytes:
            raise ReplicaError(f"{path} is shorter than its index says", "torn")
        return memoryview(known[1])[:size_bytes]
