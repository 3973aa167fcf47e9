"""A rank's part of a checkpoint: written, hashed, and named in a file beside it."""

import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from xxhash import xxh3_128, xxh3_128_hexdigest

from trainer_sdk.checkpoint.durability import put_durably, sync_file, sync_names
from trainer_sdk.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    BadManifestError,
    Entry,
    ImageIndex,
    Manifest,
    Part,
    ShardFile,
    decode,
    encode,
    step_name,
)
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.names import SAVING
from trainer_sdk.checkpoint.storage.port import MissingError, Storage
from trainer_sdk.checkpoint.writer.disk import (
    CHUNK_BYTES,
    Going,
    Hashing,
    hash_in_parts,
    write_hashed,
)
from trainer_sdk.checkpoint.writer.passage import Passage
from trainer_sdk.checkpoint.writer.protocol import WriteState

_ABOVE_RANK = 2
"""Folders between a rank's own and the one that its agent has made: own/, and that itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the files of one save go, before and after they can be seen."""

    storage: Storage
    step: str
    """The name that it gets."""
    before: str
    """The folder in which its files are made."""
    inside: str
    """What their names begin with, as the manifest has them."""

    def path(self, name: str) -> str:
        """Of a file, for people."""
        return f"{self.storage.url}/{self.before}/{name}"


def place_of(root: str, saving: str, step: int) -> Place:
    """In a folder of its own; in an object store that is below the step, and stays there."""
    storage, name = storage_for(root), step_name(step)
    if isinstance(storage, Folder):
        return Place(storage, name, f"{SAVING}/{saving}", "")
    return Place(storage, name, f"{name}/{saving}", f"{saving}/")


def part_name(rank: int) -> str:
    """What a rank has made durable."""
    return f"part-{rank:05d}.json"


def failure_name(rank: int) -> str:
    """Why a rank has given up."""
    return f"failed-{rank:05d}.json"


def part_of(place: Place, rank: int) -> Part | None:
    """What a rank has made durable, until it can be seen."""
    name = f"{place.before}/{part_name(rank)}"
    try:
        return decode(place.storage.read(name), Part, f"{place.storage.url}/{name}")
    except MissingError:
        return None


def visible(place: Place) -> tuple[Manifest, str] | None:
    """What has the name of the step, and the hash of its manifest."""
    name = f"{place.step}/{MANIFEST}"
    try:
        octets = place.storage.read(name)
        found = decode(octets, Manifest, f"{place.storage.url}/{name}")
    except (MissingError, BadManifestError):
        return None
    return found, xxh3_128_hexdigest(octets)


def is_ours(there: Manifest, order: WriteState) -> bool:
    """It is what this very save has made visible."""
    return there.saving == order.saving


def write_shard(
    order: WriteState,
    windows: Iterable[memoryview],
    hashing: Hashing,
    passage: Passage,
    going: Going,
) -> float:
    """Write a rank's shard and its part, and hash the one; how long that took.

    What an attempt before has made durable is not touched: rank 0 may be publishing it.
    """
    place, began = place_of(order.root, order.saving, order.identity.step), time.monotonic()
    if _is_durable(order, place):
        _hash(windows, hashing, passage, going)
        return time.monotonic() - began
    if isinstance(place.storage, Folder):
        with _whole(os.path.join(place.storage.path, place.before), order) as path:
            write_hashed(path, order.file_bytes, windows, hashing, passage, going)
    else:
        if order.keep:  # its image is needed sooner than all of it can be sent
            windows = tuple(windows)
            _hash(windows, hashing, passage, going)
        parts = _parts(windows, passage, going)
        name = f"{place.before}/{order.shard}"
        place.storage.put(name, parts if order.keep else _hashed(parts, hashing))
    file = ShardFile(name=order.shard, size_bytes=order.file_bytes, hash=hashing.hexdigest())
    part = Part(
        identity=order.identity,
        rank=order.rank,
        files=(file,),
        stall_s=passage.stall_s,
        write_s=time.monotonic() - began,
    )
    place.storage.put(f"{place.before}/{part_name(order.rank)}", (encode(part),))
    return part.write_s


def _is_durable(order: WriteState, place: Place) -> bool:
    """An attempt before has written this rank's part; it goes with the move to the step's name."""
    if part_of(place, order.rank) is not None:
        return True
    found = visible(place)
    return found is not None and is_ours(found[0], order)


@contextmanager
def _whole(folder: str, order: WriteState) -> Generator[str]:
    """The path of a shard that gets its name when it is finished, and takes no room otherwise.

    The part of an attempt before may come at any time: its writer may hang where even a kill waits.
    """
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f".{order.shard}")
    with suppress(FileNotFoundError):
        os.unlink(path)  # that writer may still have it
    try:
        yield path
        os.replace(path, os.path.join(folder, order.shard))
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
            # Another rank may be about to say in it that it fails.
            if order.identity.world_size == 1:
                os.rmdir(folder)
        raise


def keep_image(order: WriteState, octets: memoryview, hasher: xxh3_128, going: Going) -> str:
    """Name the whole image, of which the file was hashed already, once it is durable; its hash."""
    hash_in_parts(octets[order.file_bytes : order.image_bytes], hasher, going)
    begin, length = order.entries
    index = ImageIndex(
        identity=order.identity,
        rank=order.rank,
        size_bytes=order.image_bytes,
        hash=hasher.hexdigest(),
        entries=msgspec.json.decode(octets[begin : begin + length], type=tuple[Entry, ...]),
    )
    sync_file(order.image, going)  # whoever sees the index may rely on all of it
    put_durably(Path(order.folder) / INDEX, encode(index))
    sync_names(os.path.dirname(order.folder), _ABOVE_RANK)
    return index.hash


def _hash(windows: Iterable[memoryview], hashing: Hashing, passage: Passage, going: Going) -> None:
    for octets in windows:
        passage.wait_for(len(octets))
        hash_in_parts(octets, hashing, going)


def _parts(windows: Iterable[memoryview], passage: Passage, going: Going) -> Iterator[bytes]:
    """Copies: the client may hold one for longer than the window stays as it is."""
    passed = 0
    for octets in windows:
        for at in range(0, len(octets), CHUNK_BYTES):
            begin, passed = passed, passed + len(octets[at : at + CHUNK_BYTES])
            passage.let(begin, passed)
            yield bytes(octets[at : at + CHUNK_BYTES])
            going()


def _hashed(parts: Iterable[bytes], hashing: Hashing) -> Iterator[bytes]:
    for part in parts:
        hashing.update(part)
        yield part
