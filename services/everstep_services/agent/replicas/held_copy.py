"""A whole copy on disk, as far as memory is one: its bytes, and what is beside them."""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep_services.agent.replicas.images import Head, read_head
from everstep_services.agent.replicas.memory_file import Memory
from everstep_services.agent.replicas.protocol import Copy, ReplicaError
from trainer_sdk.checkpoint.image_folder import ASIDE_INDEX, put_durably
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX

log = logging.getLogger(__name__)

INCOMING = "incoming"
PART, PART_INDEX = "part", "part.json"


@dataclass(frozen=True, slots=True)
class Held:
    """A whole copy, verified when it came."""

    copy: Copy
    head: Head
    folder: Path
    memory: Memory | None = None
    """As it was written; None for what another agent has left."""

    @property
    def path(self) -> Path:
        """Its bytes."""
        return self.folder / (IMAGE if self.copy.parts == 1 else PART)


def write_index(folder: Path, copy: Copy) -> None:
    """It is whole: let it be seen."""
    is_whole = copy.parts == 1
    name = INDEX if is_whole else PART_INDEX
    octets = copy.index if is_whole else msgspec.json.encode(copy)
    put_durably(folder / name, octets)


def unindex(folder: Path) -> None:
    """Nobody takes it for whole any more."""
    for name in (ASIDE_INDEX, INDEX, PART_INDEX):
        (folder / name).unlink(missing_ok=True)


def found(base: Path, job: str) -> Iterator[Held]:
    """What an agent that died has left here. What it was receiving is removed."""
    for place in base.glob("slot-*/rank-*/*"):
        try:
            yield _read(place, job)
        except (OSError, ValueError, msgspec.MsgspecError, ReplicaError) as error:
            log.info("held_passed_over path=%s error=%s", place, error)
            shutil.rmtree(place, ignore_errors=True)


def _read(place: Path, job: str) -> Held:
    if place.name == INCOMING:
        raise ReplicaError("it was being received")
    if (place / PART_INDEX).exists():
        copy = msgspec.json.decode((place / PART_INDEX).read_bytes(), type=Copy)
        head = read_head(copy.index)
    else:
        index = (place / INDEX).read_bytes()
        head = read_head(index)
        slot = int(place.parent.parent.name.removeprefix("slot-"))
        copy = Copy(
            slot=slot, rank=head.rank, ranks=0, step=head.identity.step,
            size_bytes=head.size_bytes, hash=head.hash, index=index,
        )  # fmt: skip
    if head.identity.job != job:
        raise ReplicaError(f"it is of job {head.identity.job}")
    return Held(copy, head, place)
