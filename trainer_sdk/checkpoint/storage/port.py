"""What checkpoints need of a storage, and nothing more.

Names are relative to the storage's place, with `/` between their parts. A name that would lead out
of it is refused, because names come from manifests, and manifests from outside.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

Octets = bytes | bytearray | memoryview
"""Bytes, or a region of a mapping."""
_MOST_BYTES = 16 << 20
"""Of several that are read at once."""
_MOST_BETWEEN_BYTES = 256 << 10
"""What nobody wants is read, too, where that is sooner done than asking once more."""


class StorageError(Exception):
    """Something cannot be kept or read; its text names the place and what to do."""


class MissingError(StorageError):
    """There is nothing of that name."""


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
        """Where it is, without a slash at its end: an absolute path, or a URL."""
        ...

    def put(self, name: str, parts: Iterable[Octets]) -> int:
        """Keep these bytes, in the place of what was there; how many they are.

        On return they are durable. Nobody ever sees a part of them.
        """
        ...

    def put_beside(self, name: str, data: bytes) -> None:
        """Keep these bytes in a folder that is there; `MissingError` when it has gone.

        In an object store there are no folders, and so none comes of it.
        """
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Keep these bytes unless others are there: one of many who try wins.

        True when they are there now, also when they were before.
        """
        ...

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """So many bytes from there on, or all. Fewer there are than asked for: `StorageError`."""
        ...

    def size(self, name: str) -> int | None:
        """How long it is; None when it is not there."""
        ...

    def folders(self, inside: str = "") -> Sequence[str]:
        """The folders in it, or in one of them, in order, without those that begin with a dot."""
        ...

    def files(self, folder: str) -> Sequence[StoredFile]:
        """Everything below a folder, in the order of names."""
        ...

    def delete(self, name: str) -> None:
        """Remove it, if it is there."""
        ...

    def remove(self, folder: str) -> int:
        """Remove a checkpoint with all that is in its folder; how many bytes that frees.

        It goes out of sight at once: its manifest before the rest, or all in one rename.
        """
        ...

    def now(self) -> datetime:
        """By its own clock: of a mark that is written for this, and removed again."""
        ...


def checked(name: str) -> str:
    """The name, if it stays within its place."""
    if not name or name.startswith("/") or any(one in ("", ".", "..") for one in name.split("/")):
        raise StorageError(f"{name!r} is no name in a checkpoint: it may lead out of its folder")
    return name


class ByteRange(NamedTuple):
    """A piece of a file."""

    file: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset of what comes after it."""
        return self.offset + self.length


def read_ranges(storage: Storage, ranges: Sequence[ByteRange]) -> Iterator[tuple[int, memoryview]]:
    """What is in each, with its number among these, in the order in which they lie in their files.

    The number of requests grows with the bytes, and not with the number of pieces.
    """
    for numbers in _near(ranges):
        file, begin, _ = ranges[numbers[0]]
        end = max(ranges[number].end for number in numbers)
        octets = memoryview(storage.read(file, begin, end - begin))
        for number in numbers:
            one = ranges[number]
            yield number, octets[one.offset - begin : one.end - begin]


def _near(ranges: Sequence[ByteRange]) -> Iterator[list[int]]:
    """The numbers of those that are read at once."""
    near: list[int] = []
    begin = end = 0
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        one = ranges[number]
        is_near = (
            bool(near)
            and one.file == ranges[near[0]].file
            and one.offset - end <= _MOST_BETWEEN_BYTES
            and one.end - begin <= _MOST_BYTES
        )
        if near and not is_near:
            yield near
            near = []
        if not near:
            begin = end = one.offset
        near.append(number)
        end = max(end, one.end)
    if near:
        yield near
