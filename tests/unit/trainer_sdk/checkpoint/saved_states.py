"""Saved states for tests of restoring: written by torch, or by hand; and ranks that restore them.

Ranks are threads of one process, each with a real gloo process group.
"""

import io
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import xxhash
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo
from torch.distributed.checkpoint.state_dict_saver import save

from trainer_sdk.checkpoint.events import CheckpointEvent, Reporter
from trainer_sdk.checkpoint.flat_state import StatePiece
from trainer_sdk.checkpoint.manifest import (
    IMAGE,
    INDEX,
    MANIFEST,
    Identity,
    ImageEntry,
    ImageIndex,
    Manifest,
    ShardFile,
    encode,
    step_name,
)
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.discovery import RestoreContext
from trainer_sdk.checkpoint.restore.restore import Restore, Restored
from trainer_sdk.checkpoint.restore.target import Target
from trainer_sdk.checkpoint.save.plan import layout_of
from trainer_sdk.checkpoint.storage import storage_for

Made = TypeVar("Made")
JOB = "vit-l"
_WITHIN = timedelta(seconds=30)


class KeptReports(Reporter):
    """A reporter that keeps its events and lines."""

    def __init__(self) -> None:
        super().__init__(0, None)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.warned: list[str] = []

    def report(self, event: CheckpointEvent) -> None:
        fields = msgspec.structs.asdict(event).items()
        body = {name: value for name, value in fields if value is not msgspec.UNSET}
        self.events.append((event.name, body))

    def warn(self, text: str) -> None:
        self.warned.append(text)


@dataclass
class Place:
    """Where the checkpoints of a job are: a folder, and the memory of one node for each rank."""

    folder: Path
    world_size: int = 1
    round: int = 2
    told: KeptReports = field(default_factory=KeptReports)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def images(self, rank: int) -> Path:
        return self.folder / f"node-{rank}"

    def home(self, rank: int, **changes: Any) -> RestoreContext:
        known: dict[str, Any] = {
            "job": JOB,
            "round": self.round,
            "rank": rank,
            "world_size": self.world_size,
            "images": self.images(rank),
            "storage": storage_for(str(self.root)),
        }
        return RestoreContext(**known | changes)

    def identity(self, step: int, layout: str, **changes: Any) -> Identity:
        known: dict[str, Any] = {
            "job": JOB,
            "round": 1,
            "step": step,
            "world_size": self.world_size,
            "layout": layout,
        }
        return Identity(**known | changes)

    def publish(self, step: int, state: dict[str, Any], **changes: Any) -> Path:
        """Save a checkpoint as torch does, with our manifest."""
        path = self.root / step_name(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is alone, torch says each time
            save(dict(state), checkpoint_id=path, no_dist=True)
        layout = layout_of([_pieces(state)] * self.world_size)
        files = tuple(_shard_file(one) for one in sorted(path.iterdir()))
        identity = self.identity(step, layout, **changes)
        manifest = Manifest(identity=identity, files=files, saved_at="2026-11-21T17:00:00Z")
        (path / MANIFEST).write_bytes(encode(manifest))
        return path

    def keep(
        self, step: int, rank: int, state: Mapping[str, Any], held: bool = False, **changes: Any
    ) -> Path:
        """An image in the memory of the rank's node."""
        own = self.images(rank) / "own" / f"rank-{rank}" / f"buffer-{step}"
        folder = self.images(rank) / "held" / "slot-0" / f"rank-{rank}" / str(step)
        folder = folder if held else own
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        target = Target(dict(state), changes.pop("keys", ()))
        octets, entries = _image(target)
        layout = layout_of([target.pieces] * self.world_size)
        owner = changes.pop("owner", rank)
        layout = changes.pop("layout", layout)
        index = ImageIndex(
            identity=self.identity(step, layout, **changes),
            rank=owner,
            size_bytes=len(octets),
            hash=xxhash.xxh3_128_hexdigest(octets),
            entries=entries,
        )
        (folder / IMAGE).write_bytes(octets)
        (folder / INDEX).write_bytes(encode(index))
        return folder

    def restore(
        self,
        states: Mapping[int, dict[str, Any]],
        step: int | None = None,
        *,
        fresh: bool = False,
        strict: bool = True,
        **changes: Any,
    ) -> list[Restored | None]:
        """All ranks at once, each into its own state."""

        def one(group: RankGroup) -> Restored | None:
            home = self.home(group.rank, **changes)
            restoring = Restore(home, group, self.told, step, is_strict=strict)
            return restoring.restore(states[group.rank], allow_fresh_start=fresh)

        return together(self.world_size, one)


def together(size: int, work: Callable[[RankGroup], Made]) -> list[Made]:
    """The results of all ranks; raises the first error if one has failed."""
    store = HashStore()
    made: dict[int, Made] = {}
    failed: list[BaseException] = []
    groups: list[Any] = []  # none ends while another rank may still hear of it

    def run(rank: int) -> None:
        try:
            group: Any = None
            if size > 1:
                group = ProcessGroupGloo(store, rank, size, _WITHIN)
                groups.append(group)
            made[rank] = work(RankGroup(group))
        except BaseException as error:
            failed.append(error)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    if failed:
        raise failed[0]
    return [made[rank] for rank in range(size)]


def flip_bit(path: Path, at: int) -> None:
    octets = bytearray(path.read_bytes())
    octets[at // 8] ^= 1 << (at % 8)
    path.write_bytes(octets)


def _pieces(state: Mapping[str, Any]) -> tuple[StatePiece, ...]:
    return Target(dict(state)).pieces


def _shard_file(path: Path) -> ShardFile:
    octets = path.read_bytes()
    return ShardFile(name=path.name, size_bytes=len(octets), hash=xxhash.xxh3_128_hexdigest(octets))


def _image(target: Target) -> tuple[bytes, tuple[ImageEntry, ...]]:
    octets, entries = bytearray(), []
    for key, value in target.values.items():
        octets += bytes(-len(octets) % 64)
        about: dict[str, Any] = {}
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            about = {"dtype": str(value.dtype), "shape": tuple(value.shape)}
        else:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            data = buffer.getvalue()
        entries.append(ImageEntry(key=key, offset=len(octets), length=len(data), **about))
        octets += data
    return bytes(octets), tuple(entries)
