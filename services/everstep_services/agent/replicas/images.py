"""The whole states of this node's own ranks."""

import logging
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.evidence.files import open_regular
from everstep_services.agent.replicas.transfer.protocol import Copy, ReplicaError
from trainer_sdk.checkpoint.image_folder import RestoredState, restored_state
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, VERSION, Identity

log = logging.getLogger(__name__)

_LONGEST_INDEX = 8 << 20


class ImageHead(msgspec.Struct, frozen=True, kw_only=True):
    """An `ImageIndex` without the contents of the image."""

    identity: Identity
    rank: int
    size_bytes: int
    hash: str
    version: int = VERSION

    @property
    def age(self) -> tuple[int, int, int]:
        """The greater is newer: a later round may begin at an earlier step."""
        return self.identity.age


_HEAD = msgspec.json.Decoder(ImageHead)


def read_head(index: bytes) -> ImageHead:
    """Read the index of an image. Raises `ReplicaError`."""
    try:
        head = _HEAD.decode(index)
    except msgspec.MsgspecError as error:
        raise ReplicaError(f"an index is not what was written: {error}", "torn") from error
    if head.version > VERSION:
        raise ReplicaError(f"an index has version {head.version}, this release reads {VERSION}")
    return head


@dataclass(frozen=True, slots=True)
class CopyFile:
    """A state, or a part of it, in a file."""

    copy: Copy
    path: Path


@dataclass(frozen=True, slots=True)
class Image:
    """A whole state of one rank, and where it is."""

    head: ImageHead
    index: bytes
    path: Path

    def is_there(self) -> bool:
        """Its rank has not begun to overwrite it."""
        return _read(self.path.with_name(INDEX)) == self.index

    def copy(self, slot: int, ranks: int) -> Copy:
        """All of it, in the form sent to other nodes."""
        head = self.head
        return Copy(
            slot=slot,
            rank=head.rank,
            ranks=ranks,
            step=head.identity.step,
            size_bytes=head.size_bytes,
            hash=head.hash,
            index=self.index,
        )


class OwnImages:
    """The states below `own/` of a job; ranks write there, this class only reads."""

    def __init__(self, base: Path, job: str) -> None:
        self.base = base / "own"
        self._job = job

    def of(self, rank: int) -> list[Image]:
        """The whole states of a rank, newest first."""
        return sorted(self._found(rank), key=lambda image: image.head.age, reverse=True)

    def going_on(self, rank: int) -> list[Image]:
        """The same without states that the training abandoned when it went back to an older one."""
        images, restored = self.of(rank), self.restored(rank)
        if restored is None:
            return images
        return [image for image in images if not restored.has_left(image.head.identity)]

    def restored(self, rank: int) -> RestoredState | None:
        """The state from which the rank has gone on."""
        return restored_state(self.base / f"rank-{rank}")

    def drop_others(self, ranks: Collection[int]) -> None:
        """Remove the states of ranks that this node had before."""
        names = {f"rank-{rank}" for rank in ranks}
        for folder in self.base.glob("rank-*"):
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def _found(self, rank: int) -> Iterator[Image]:
        try:
            buffers = list((self.base / f"rank-{rank}").iterdir())
        except OSError:  # it has none, they are being removed, or nothing can be opened now
            return
        for buffer in buffers:
            index = _read(buffer / INDEX)
            if index is None:
                continue
            try:
                head = read_head(index)
            except ReplicaError as error:
                log.warning("image_passed_over path=%s error=%s", buffer, error)
                continue
            if head.identity.job == self._job and head.rank == rank:
                yield Image(head, index, buffer / IMAGE)


def _read(path: Path) -> bytes | None:
    try:
        with open_regular(path) as file:
            return file.read(_LONGEST_INDEX)
    except OSError:
        return None
