"""The documents of a checkpoint: whose state it is, which files it has, and the hash of each.

A rank writes its `RankPart` beside its shard; a `Manifest` of all parts makes the checkpoint
visible. An image, which is a rank's state in the memory of a node, has its `ImageIndex` beside it.
"""

from typing import TypeVar

import msgspec

from trainer_sdk.checkpoint.hashing import hash_of

VERSION = 1
MANIFEST = "manifest.json"
"""Whoever has it is complete: it is written last."""
METADATA = ".metadata"
"""What torch's own loader reads."""
IMAGE = "image"
INDEX = "index.json"
"""Beside an image, written when the image is whole."""


class BadManifestError(Exception):
    """It is not what was written, or was written by a newer release."""


class NewerManifestError(BadManifestError):
    """A newer release has written it: nothing speaks against it but this one's age."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose state it is. A state of another identity is never loaded."""

    job: str
    round: int
    """The round that saved it."""
    step: int
    """The step after which it was saved."""
    world_size: int
    layout: str
    """The hash of keys, shapes, dtypes and shardings of all ranks."""

    @property
    def age(self) -> tuple[int, int]:
        """What is greater is newer: a later round may begin at an earlier step."""
        return self.round, self.step


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file or object of a checkpoint."""

    name: str
    """Relative to the manifest."""
    size_bytes: int
    hash: str
    """Of its bytes, in hex; `hashing` names the algorithm."""


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has made durable."""

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
    """What the training wants to find again, as short texts."""
    saving: str = ""
    """The name that this save had until it could be seen: no other save has the same."""
    is_readable: bool = False
    """Each value that is no tensor was read back before it was written, as a restore reads it."""
    version: int = VERSION

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(one.size_bytes for one in self.files)


class ImageEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor, or another value, in an image."""

    key: str
    offset: int
    """Of its bytes in the image."""
    length: int
    dtype: str = ""
    """As `torch.float32`; empty for a value that is no tensor, which is what `torch.save` makes."""
    shape: tuple[int, ...] = ()


class ImageIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What is in an image: all that one rank needs to go on."""

    identity: Identity
    rank: int
    size_bytes: int
    hash: str
    """Of these bytes, in hex."""
    entries: tuple[ImageEntry, ...]
    version: int = VERSION


_CHECK, _END = b',"check":"', b'"}'
Document = TypeVar("Document", RankPart, Manifest, ImageIndex)


def encode(document: RankPart | Manifest | ImageIndex) -> bytes:
    """As JSON, for people too. Its last field is the hash of all that comes before."""
    said = msgspec.json.encode(document).removesuffix(b"}")
    return said + _CHECK + hash_of(said).encode() + _END


def decode(octets: bytes, of: type[Document], place: str) -> Document:
    """What was written; `place` is named if it is not that."""
    said, _, check = octets.rpartition(_CHECK)
    if check != hash_of(said).encode() + _END:
        raise BadManifestError(f"{place} is not what was written: it is cut short, or has changed")
    try:
        document = msgspec.json.decode(octets, type=of)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadManifestError(f"{place} is not what was written: {error}") from error
    if document.version > VERSION:
        raise NewerManifestError(
            f"{place} has version {document.version}, and this release reads {VERSION} at most: "
            "use a newer release"
        )
    return document


def step_name(step: int) -> str:
    """The folder, or prefix, of a step."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step of such a name."""
    head, _, digits = name.partition("-")
    return int(digits) if head == "step" and digits.isdigit() else None
