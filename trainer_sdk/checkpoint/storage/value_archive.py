"""The bytes of a value that is not a tensor: an archive of torch with a record of ours in it.

Torch reads the pickle in the archive, and `dcp.load` with it. Everstep reads its own record: a flat
list of plain items in MessagePack, in which an operation makes one value of the last items before
it. So there is no code in it, no reference and no nesting. Archives of older releases, and of torch
itself, have only the pickle; that is read as data (`pickle_data.py`). Needs no torch.
"""

import io
import zipfile
from collections.abc import Sequence

import msgspec
from msgspec.msgpack import Ext

from trainer_sdk.checkpoint.storage.pickle_data import UnreadableBytesError, short

_KIND_NAMES = (
    "dict frozenset list set tuple collections.Counter collections.OrderedDict stored "
    "bytearray complex int range slice str datetime.date datetime.datetime datetime.time "
    "datetime.timedelta datetime.timezone decimal.Decimal fractions.Fraction "
    "pathlib.PosixPath pathlib.PurePosixPath uuid.UUID numpy.dtype numpy.generic numpy.ndarray "
    "torch.Size torch.Tensor torch.device torch.dtype torch.layout torch.nn.Parameter "
    "compressed_by_columns compressed_by_rows conjugate negative quantized "
    "quantized_by_channel requires_grad sparse"
)
KINDS = frozenset(_KIND_NAMES.split())
"""What an operation can make (`value_kinds.py`)."""
BYTES = 1
"""The extension for bytes, as texts and bytes cannot both be expected."""
_RECORD = "everstep.msgpack"
_MOST_FILES = 100_000
_LOCAL_HEADER_BYTES = 30
_SHORTEST_REFERENCE = 256
_TRIES = 16


class Made(msgspec.Struct, frozen=True, array_like=True):
    """An operation: one value is made of the last `count` items."""

    kind: str
    count: int


Item = None | bool | int | float | str | Ext | Made


class ValueArchive:
    """The files in the bytes of a value; `UnreadableBytesError` if there are none."""

    def __init__(self, octets: bytes) -> None:
        self.octets = octets
        try:
            if octets.count(b"PK\1\2") > _MOST_FILES:
                raise UnreadableBytesError(f"it has more than {_MOST_FILES} files")
            with zipfile.ZipFile(io.BytesIO(octets)) as archive:
                self._files = {info.filename: info for info in archive.infolist()}
            self._top = next(name for name in self._files if name.endswith("/data.pkl"))[:-8]
        except (zipfile.BadZipFile, StopIteration, ValueError, OSError, NotImplementedError) as e:
            raise UnreadableBytesError(f"it is not what torch writes: {short(e)}") from e

    @property
    def pickled(self) -> bytes:
        """Its pickle."""
        return self.file("data.pkl")

    def items(self) -> Sequence[Item] | None:
        """Its record; None if it has none."""
        if self._top + _RECORD not in self._files:
            return None
        try:
            return msgspec.msgpack.decode(self.file(_RECORD), type=list[Item])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnreadableBytesError(f"its record cannot be read: {short(error)}") from error

    def file(self, name: str) -> bytes:
        """The bytes of a file. Its checksum is not compared: the whole was verified by its hash."""
        info = self._files.get(self._top + name)
        if info is None or info.compress_type or info.file_size != info.compress_size:
            raise UnreadableBytesError(f"it has no file {short(name)}, or a compressed one")
        at = info.header_offset
        head = self.octets[at : at + _LOCAL_HEADER_BYTES]
        begin = at + _LOCAL_HEADER_BYTES
        begin += int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        content = self.octets[begin : begin + info.file_size]
        if len(content) != info.file_size:
            raise UnreadableBytesError(f"its file {short(name)} is cut short")
        return content


def encoded(items: Sequence[Item]) -> bytes:
    """A record."""
    return msgspec.msgpack.encode(items)


def largest(items: Sequence[Item]) -> int:
    """The length of the longest bytes or text."""
    return max((len(_content(item)) for item in items), default=0)


def with_record(archive: bytes, items: Sequence[Item]) -> bytes:
    """The archive of torch with our record in it, which refers to bytes that are there already."""
    sparing: list[Item] = []
    for item in items:
        content, at = _content(item), -1
        if isinstance(content, bytes) and len(content) >= _SHORTEST_REFERENCE:
            at = _place_of(content, archive)
        sparing += [item] if at < 0 else [at, len(content), Made("stored", 2)]
    octets = io.BytesIO(archive)
    with zipfile.ZipFile(octets, "a") as file:
        top = next(name for name in file.namelist() if name.endswith("/data.pkl"))[:-8]
        file.writestr(zipfile.ZipInfo(top + _RECORD), encoded(sparing))
    return octets.getvalue()


def _content(item: Item) -> bytes | str:
    """The bytes or the text of an item; empty for another."""
    if type(item) is Ext:
        return bytes(item.data)
    return item if type(item) is str else b""


def _place_of(octets: bytes, archive: bytes) -> int:
    """Where these bytes are in the archive; -1 if they are not seen there."""
    at = -1
    for _ in range(_TRIES):
        at = archive.find(octets[:_SHORTEST_REFERENCE], at + 1)
        if at < 0 or archive.startswith(octets, at):
            return at
    return -1
