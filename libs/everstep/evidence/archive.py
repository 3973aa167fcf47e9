"""Archives of evidence: a `.tar.gz` with a piece of each rank, and why others have none (ADR-0059).

Written so that a person can unpack it, and read as bytes of strangers: one member at a time,
within bounds, and nothing of it is ever written to a path that it names.
"""

import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from everstep.errors import EverstepError

MISSING = "missing.json"
MAX_MEMBERS = 4096
MAX_MEMBER_BYTES = 64 * 1024 * 1024
MAX_BYTES = 512 * 1024 * 1024
"""The limit of all members together."""
MAX_MISSING_BYTES = 1024 * 1024
MAX_RATIO = 500
"""The largest ratio of unpacked to packed; above it, an archive is treated as a bomb."""

_RATIO_FROM_BYTES = 4 * 1024 * 1024
"""The ratio of archives below this size is not limited."""
_BLOCK = 512
_END = bytes(_BLOCK)
_LEVEL = 3
"""Evidence is packed while ranks wait to be restarted."""
_NAME = re.compile(r"(?:rank_(?P<rank>\d{1,7})|node)\.(?P<suffix>[a-z][a-z0-9_.]{0,31})")
_MAGIC = b"\x1f\x8b"
_UNANSWERED = re.compile(r"no answer within ([\d.e+-]+) s$")


class BadArchiveError(EverstepError):
    """These bytes are not an archive of evidence, or unpack to more than one may hold."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file of an archive."""

    rank: int | None
    """The rank that it is of; None for the node."""
    suffix: str
    """Without the dot: `json`, `txt`, `pickle`."""
    content: bytes

    @property
    def name(self) -> str:
        """`rank_7.json` or `node.txt`."""
        return f"{'node' if self.rank is None else f'rank_{self.rank}'}.{self.suffix}"


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of an archive, all in memory."""

    members: tuple[ArchiveMember, ...]
    missing: Mapping[int, str]
    """Ranks without a file, and why."""


def unanswered(within_s: float) -> str:
    """Why a rank has no file that was asked for as long as this; `unanswered_s` reads it."""
    return f"no answer within {within_s:.2g} s"


def unanswered_s(reason: str) -> float | None:
    """How long an answer was waited for; None where that is not why the file is missing."""
    match = _UNANSWERED.search(reason)
    return None if match is None else float(match[1])


def is_archive(data: bytes) -> bool:
    """Whether it may be an archive, by its first bytes."""
    return data.startswith(_MAGIC)


def pack(members: Iterable[ArchiveMember], missing: Mapping[int, str]) -> bytes:
    """The archive of these members; equal members make equal bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=_LEVEL, filename="", mtime=0) as out,
        tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        reasons = {str(rank): reason for rank, reason in sorted(missing.items())}
        _add(tar, MISSING, json.dumps(reasons, indent=1).encode())
        for member in members:
            if _NAME.fullmatch(member.name) is None:
                raise ValueError(f"{member.name!r} cannot be in an archive of evidence")
            _add(tar, member.name, member.content)
    return packed.getvalue()


def unpack(data: bytes | BinaryIO) -> Archive:
    """The contents of an archive; raises `BadArchiveError` if it is not an archive of evidence."""
    members: list[ArchiveMember] = []
    missing: Mapping[int, str] = {}
    for name, content in files(data):
        if name == MISSING:
            missing = _reasons(content)
        else:
            members.append(_member(name, content))
    return Archive(tuple(members), missing)


def members(data: bytes | BinaryIO) -> Iterator[ArchiveMember]:
    """One file after the other, so that only one is held."""
    for name, content in files(data):
        if name != MISSING:
            yield _member(name, content)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size, header.mode = len(content), 0o600
    tar.addfile(header, io.BytesIO(content))


def files(data: bytes | BinaryIO) -> Iterator[tuple[str, bytes]]:
    """The names and contents of all files, each name once and safe as a name in a folder.

    The headers are read here rather than by `tarfile`, which follows links, long names, sparse
    maps and extended headers; of all that our archives have nothing.
    """
    unpacked = _Unpacked(io.BytesIO(data) if isinstance(data, bytes) else data)
    names: set[str] = set()
    while (header := unpacked.read(_BLOCK)) != _END:
        name, size = _header(header)
        if name in names:
            raise BadArchiveError(f"the archive has {name} twice")
        names.add(name)
        if len(names) > MAX_MEMBERS:
            raise BadArchiveError(f"the archive has more than {MAX_MEMBERS} files")
        content = unpacked.read(size)
        unpacked.read(-size % _BLOCK)
        yield name, content


def _header(block: bytes) -> tuple[str, int]:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise BadArchiveError(f"the archive is damaged: {error}") from error
    name, size = header.name, header.size
    if header.type not in {tarfile.REGTYPE, tarfile.AREGTYPE}:
        raise BadArchiveError(f"the archive has {name!r}, which is not a plain file")
    if name != MISSING and _NAME.fullmatch(name) is None:
        raise BadArchiveError(
            f"the archive has {name!r}: rank_<n>.<suffix>, node.<suffix> or {MISSING} may be in it"
        )
    most = MAX_MISSING_BYTES if name == MISSING else MAX_MEMBER_BYTES
    if not 0 <= size <= most:
        raise BadArchiveError(f"{name} of the archive has {size} bytes, at most {most} are read")
    return name, size


def _member(name: str, content: bytes) -> ArchiveMember:
    match = _NAME.fullmatch(name)
    assert match is not None
    rank = match["rank"]
    return ArchiveMember(None if rank is None else int(rank), match["suffix"], content)


def _reasons(content: bytes) -> Mapping[int, str]:
    try:
        reasons = json.loads(content)
        return {int(rank): str(reason) for rank, reason in reasons.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise BadArchiveError(f"{MISSING} of the archive is damaged: {error}") from error


class _Unpacked:
    """The unpacked bytes, up to the limit of an archive."""

    def __init__(self, packed: BinaryIO) -> None:
        self._counted = _Counted(packed)
        self._file = gzip.GzipFile(fileobj=self._counted, mode="rb")  # type: ignore[call-overload]
        self._octets = 0

    def read(self, size: int) -> bytes:
        """Exactly this number of bytes."""
        self._octets += size
        if self._octets > MAX_BYTES:
            raise BadArchiveError(f"the archive has more than {MAX_BYTES} bytes unpacked")
        parts = bytearray()
        while len(parts) < size:
            parts += self._part(min(size - len(parts), 1 << 20))
        return bytes(parts)

    def _part(self, size: int) -> bytes:
        try:
            part = self._file.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise BadArchiveError(f"the archive cannot be unpacked: {error}") from error
        if not part:
            raise BadArchiveError("the archive is cut short")
        is_large = self._file.tell() > _RATIO_FROM_BYTES
        if is_large and self._file.tell() > MAX_RATIO * self._counted.octets:
            raise BadArchiveError(
                f"the archive unpacks to more than {MAX_RATIO} times its size, as a bomb would"
            )
        return bytes(part)


class _Counted:
    """A file that counts the bytes read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.octets = 0

    def read(self, size: int = -1) -> bytes:
        part = self._file.read(size)
        self.octets += len(part)
        return part
