"""The folder of images on a node: the images of each rank, and which must not be restored.

The index of a quarantined image is put aside, and put back when it is released. Images on a local
disk are made durable before they count:
<images>/disk    written by the agent if this folder is on a disk (`local_root`), not in memory
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.evidence.files import read_regular
from trainer_sdk.checkpoint.manifest import INDEX, BadManifestError, Identity, ImageIndex, decode
from trainer_sdk.checkpoint.restore.choice import MEMORY, PEER, Tier
from trainer_sdk.checkpoint.storage.checkpoints import CheckpointMark
from trainer_sdk.checkpoint.storage.folder import sync_folder

MARKED_INDEX = "index.quarantined.json"
"""Takes the place of the index of an image that must not be restored; has the reason."""
ASIDE_INDEX = "index.aside.json"
"""The index that was put aside. It is removed when another state is written over the image."""
RESTORED = "restored.json"
"""Next to a rank's own images: the state from which the training has continued."""
NUMERICS = "numerics.json"
"""Next to checkpoints, or to the images of rank 0 if there are no others: see `Skips`."""
ON_DISK = "disk"
Document = TypeVar("Document")
_PIECE_BYTES = 64 << 20
_WRITE_AND_WAIT = 7
"""Of sync_file_range: before, write and after."""
_library = ctypes.CDLL(None)


def is_on_disk(images: Path | str) -> bool:
    """Whether these images outlive a reboot."""
    return bool(images) and os.path.exists(os.path.join(images, ON_DISK))


def sync_file(path: Path | str, going: Callable[[], None] = lambda: None) -> None:
    """Make a file durable, also bytes written through a mapping; `going` is called at progress."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(0, os.fstat(file).st_size, _PIECE_BYTES):
            begin, length = ctypes.c_int64(at), ctypes.c_int64(_PIECE_BYTES)
            # fsync reports errors of this call, and flushes the disk's cache.
            _library.sync_file_range(file, begin, length, ctypes.c_uint(_WRITE_AND_WAIT))
            going()
        os.fsync(file)
    finally:
        os.close(file)


def sync_names(folder: Path | str, above: int) -> None:
    """Make the names in a folder durable, and in this many folders above it."""
    for _ in range(above + 1):
        sync_folder(str(folder))
        folder = os.path.dirname(folder)


def put_durably(path: Path, octets: bytes) -> None:
    """Replace a small file durably: it has the new content, or the old."""
    written = path.with_name(f".{path.name}")
    with written.open("wb") as file:
        file.write(octets)
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)
    sync_folder(str(path.parent))


def read_document(path: Path, of: type[Document]) -> Document | None:
    """A small document as JSON; None if there is none that can be read."""
    try:
        return msgspec.json.decode(read_regular(path), type=of)
    except (OSError, msgspec.DecodeError):
        return None


class MarkedImage(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of an image, and the identity of the marked state."""

    identity: Identity
    mark: CheckpointMark


class RestoredState(msgspec.Struct, frozen=True, kw_only=True):
    """The state from which the training has continued."""

    identity: Identity
    round: int
    """The round that has restored it."""
    rollbacks: int = 0
    """How often that round had gone back in place, with this restore."""

    def has_left(self, other: Identity) -> bool:
        """Whether the training has abandoned `other`: a newer state that was saved before."""
        own = self.round, self.rollbacks
        return other.course < own and other.age > self.identity.age


def mark_restored(folder: Path, restored: RestoredState) -> None:
    """Tell the agent, which keeps these images, what was restored."""
    put_durably(folder / RESTORED, msgspec.json.encode(restored))


def restored_state(folder: Path) -> RestoredState | None:
    """The state that was restored last; None if there is none."""
    return read_document(folder / RESTORED, RestoredState)


def mark_image(folder: Path, identity: Identity, mark: CheckpointMark) -> None:
    """Quarantine an image: put its index aside, and write the reason in its place."""
    marked = msgspec.json.encode(MarkedImage(identity=identity, mark=mark))
    put_durably(folder / MARKED_INDEX, marked)
    with suppress(FileNotFoundError):
        os.replace(folder / INDEX, folder / ASIDE_INDEX)
    sync_names(folder, 0)


def marked_image(folder: Path) -> MarkedImage | None:
    """The mark of the image in this folder; None if it may be restored."""
    return read_document(folder / MARKED_INDEX, MarkedImage)


def release_image(folder: Path, marked: MarkedImage) -> bool:
    """Remove the mark; whether the image is still there, and may be restored again."""
    with suppress(FileNotFoundError, FileExistsError):  # another state is, or was, written over it
        os.link(folder / ASIDE_INDEX, folder / INDEX)
    for name in (ASIDE_INDEX, MARKED_INDEX):
        (folder / name).unlink(missing_ok=True)
    try:
        index = decode(read_regular(folder / INDEX), ImageIndex, str(folder))
    except (OSError, BadManifestError):
        return False
    return index.identity == marked.identity


def image_folders(images: Path | None, rank: int | None = None) -> Iterator[tuple[Tier, Path]]:
    """The folders of images on this node: the ranks' own, and copies for other nodes."""
    if images is None:
        return
    of = "rank-*" if rank is None else f"rank-{rank}"
    patterns: dict[Tier, str] = {MEMORY: f"own/{of}/*", PEER: f"held/slot-*/{of}/*"}
    for tier, pattern in patterns.items():
        for folder in sorted(images.glob(pattern)):
            if folder.is_dir():
                yield tier, folder


def release_images(images: Path, step: int) -> list[tuple[Tier, Path]]:
    """Release the images of a step; those of them that are still there."""
    return [
        (tier, folder)
        for tier, folder in image_folders(images)
        if (marked := marked_image(folder)) is not None
        and marked.identity.step == step
        and release_image(folder, marked)
    ]
