"""The operations of a storage of checkpoints, and reads of many ranges at once.

Names are relative to the storage's place, with `/` between their parts. A name that leads out of
the place is refused, because names come from manifests, which are input from outside.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

Octets = bytes | bytearray | memoryview
"""Bytes, or a region of a mapping."""
_MOST_BYTES = 16 << 20
"""The most bytes of ranges that are read at once."""
_MOST_BETWEEN_BYTES = 256 << 10
"""A gap up to this size is read as well, as that is faster than another request."""

_MOST_WHOLE_BYTES = 256 << 20
_MOST_METADATA_BYTES = 1 << 30


class StorageError(Exception):
    """A storage cannot write or read; the text names the place and the remedy."""


class MissingError(StorageError):
    """There is no file of that name."""


class IrregularFileError(StorageError):
    """There is something else under that name: a FIFO, a folder, a socket, or far more bytes."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file or an object."""

    name: str
    size_bytes: int
    changed_at: datetime
    """By the storage's own clock."""


class Storage(Protocol):
    """A folder, or a prefix in an object store. Every call may block; any thread may call."""

    @property
    def url(self) -> str:
        """Its absolute path, or URL, without a slash at the end."""

    def put(self, name: str, parts: Iterable[Octets]) -> int:
        """Write a file, or replace it; returns its size.

        On return it is durable. A reader never sees a part of it.
        """

    def put_beside(self, name: str, data: bytes) -> None:
        """Write a file in a folder that exists; `MissingError` if the folder is gone.

        An object store has no folders, and so no such error.
        """

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one: of several writers, one wins.

        True if the file has these bytes now, also if it had them before.
        """

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Read `length` bytes, or all of a small document; `StorageError` if the file has fewer."""

    def size(self, name: str) -> int | None:
        """The size of a file; None if it does not exist."""

    def folders(self, inside: str = "") -> Sequence[str]:
        """The names of its folders, or of those in `inside`, sorted; none begins with a dot."""

    def files(self, folder: str) -> Sequence[StoredFile]:
        """All files below a folder, sorted by name."""

    def delete(self, name: str) -> None:
        """Remove a file, if it exists."""

    def remove(self, folder: str) -> int:
        """Remove the folder of a checkpoint; returns how many bytes that frees.

        The checkpoint disappears at once: its manifest first, or the folder by one rename.
        """

    def now(self) -> datetime:
        """The time by the storage's clock, from a file that is written for this and removed."""


def checked(name: str) -> str:
    """The name; `StorageError` if it leads out of the storage."""
    if not name or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise StorageError(f"{name!r} is not a name in a checkpoint: it may lead out of its folder")
    return name


def small(place: str, size_bytes: int, most_bytes: int = _MOST_WHOLE_BYTES) -> int:
    """The size of a file that is read as a whole; `IrregularFileError` if that fills the memory.

    A file of any size takes no space where nothing was written into it.
    """
    if size_bytes > most_bytes:
        raise IrregularFileError(
            f"{place} has {size_bytes} bytes, and at most {most_bytes} are read at once: it is not "
            f"what a save has written"
        )
    return size_bytes


def read_metadata(storage: Storage, name: str) -> bytes:
    """Torch's metadata, which has a line for each part of each tensor."""
    size = storage.size(name) or 0
    return storage.read(name, 0, small(f"{storage.url}/{name}", size, _MOST_METADATA_BYTES))


def size_flaw(storage: Storage, name: str, size_bytes: int) -> str:
    """Why a file is not one of this size; empty if it is."""
    size = storage.size(name)
    if size == size_bytes:
        return ""
    try:
        storage.read(name, 0, 0)
    except IrregularFileError as error:
        return str(error)
    except MissingError:
        size = None
    there = "is missing" if size is None else f"has {size} bytes"
    return f"{storage.url}/{name} {there}, and {size_bytes} bytes were saved"


class ByteRange(NamedTuple):
    """A range of bytes in a file."""

    file: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.length


def read_ranges(storage: Storage, ranges: Sequence[ByteRange]) -> Iterator[tuple[int, memoryview]]:
    """The bytes of each range, with the range's number, in the order of the files.

    The number of requests grows with the bytes, and not with the number of pieces.
    """
    for numbers in _near(ranges):
        file, begin, _ = ranges[numbers[0]]
        end = max(ranges[number].end for number in numbers)
        octets = memoryview(storage.read(file, begin, end - begin))
        for number in numbers:
            piece = ranges[number]
            yield number, octets[piece.offset - begin : piece.end - begin]


def _near(ranges: Sequence[ByteRange]) -> Iterator[list[int]]:
    """The numbers of ranges that are read together."""
    near: list[int] = []
    begin = end = 0
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        piece = ranges[number]
        is_near = (
            bool(near)
            and piece.file == ranges[near[0]].file
            and piece.offset - end <= _MOST_BETWEEN_BYTES
            and piece.end - begin <= _MOST_BYTES
        )
        if near and not is_near:
            yield near
            near = []
        if not near:
            begin = end = piece.offset
        near.append(number)
        end = max(end, piece.end)
    if near:
        yield near
