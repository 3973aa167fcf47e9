"""The documents of a checkpoint: its identity, its files, and the hash of each file.

A rank writes its `RankPart` next to its shard; a `Manifest` of all parts makes the checkpoint
visible. An image, which is a rank's state in the memory of a node, has its `ImageIndex` next to it.
"""

from typing import Any, TypeVar

import msgspec

from everstep.hashing import hash_of

VERSION = 1
MANIFEST = "manifest.json"
"""Written last: a folder that has it is complete."""
METADATA = ".metadata"
"""For torch's own loader."""
IMAGE = "image"
INDEX = "index.json"
"""Next to an image, written when the image is whole."""


class BadManifestError(Exception):
    """A document is not what was written, or a newer release wrote it."""


class NewerManifestError(BadManifestError):
    """A newer release wrote the document: this release cannot read it; it may be undamaged."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which state it is. A state of another identity is never loaded."""

    job: str
    round: int
    """The round that saved it."""
    step: int
    """The step after which it was saved."""
    world_size: int
    layout: str
    """The hash of keys, shapes, dtypes and shardings of all ranks."""
    rollbacks: int = 0
    """How often its round had gone back to an older state in place."""

    @property
    def course(self) -> tuple[int, int]:
        """The round, and the part of it between two roll-backs; greater is later."""
        return self.round, self.rollbacks

    @property
    def age(self) -> tuple[int, int, int]:
        """Greater is newer: a later round may begin at an earlier step."""
        return *self.course, self.step


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file or object of a checkpoint."""

    name: str
    """Relative to the manifest."""
    size_bytes: int
    hash: str
    """Of its bytes, in hex; `hashing` names the algorithm."""


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """The files that one rank has made durable."""

    identity: Identity
    rank: int
    files: tuple[ShardFile, ...]
    stall_s: float = 0.0
    write_s: float = 0.0
    version: int = VERSION


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole checkpoint of the global tier."""

    identity: Identity
    files: tuple[ShardFile, ...]
    """All shards of all ranks, and torch's metadata."""
    saved_at: str
    """UTC, for people."""
    occasion: str = "interval"
    """`interval`, `requested`, `preemption` or `end`."""
    has_data_position: bool = False
    user: dict[str, str] = {}
    """Short texts that later rounds read."""
    saving: str = ""
    """The name of this save until it was visible: no other save has the same."""
    is_readable: bool = False
    """Whether all values that are not tensors were read back, as a restore does."""
    version: int = VERSION

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)


class ImageEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor, or another value, in an image."""

    key: str
    offset: int
    """Of its bytes in the image."""
    length: int
    dtype: str = ""
    """As `torch.float32`; empty for the output of `torch.save`, which every other value is."""
    shape: tuple[int, ...] = ()


class ImageIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The index of an image, which has the whole state of a rank."""

    identity: Identity
    rank: int
    size_bytes: int
    hash: str
    """Of these bytes, in hex."""
    entries: tuple[ImageEntry, ...]
    version: int = VERSION


_DIGITS_MOST = 16
_CHECK, _END = b',"check":"', b'"}'
Document = TypeVar("Document", RankPart, Manifest, ImageIndex)
# Made at import: two threads that have msgspec look at a class for the first time at once crash.
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    of: msgspec.json.Decoder(of) for of in (RankPart, Manifest, ImageIndex)
}


def encode(document: RankPart | Manifest | ImageIndex) -> bytes:
    """The document as JSON, whose last field is the hash of all before it."""
    body = msgspec.json.encode(document).removesuffix(b"}")
    return body + _CHECK + hash_of(body).encode() + _END


def decode(octets: bytes, of: type[Document], place: str) -> Document:
    """The document that was written; `BadManifestError` names `place` if it has changed."""
    body, _, check = octets.rpartition(_CHECK)
    if check != hash_of(body).encode() + _END:
        raise BadManifestError(f"{place} is not what was written: it is cut short, or has changed")
    try:
        document: Document = _DECODERS[of].decode(octets)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadManifestError(f"{place} is not what was written: {error}") from error
    if document.version > VERSION:
        raise NewerManifestError(
            f"{place} has version {document.version}, and this release reads {VERSION} at most: "
            "use a newer release"
        )
    return document


def step_name(step: int) -> str:
    """The name of the folder, or prefix, of a step."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step of such a name; None if it is another name, or no message could hold the number."""
    head, _, digits = name.partition("-")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) < _DIGITS_MOST
    return int(digits) if head == "step" and is_number else None
