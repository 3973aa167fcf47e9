"""Makes files durable: a rank's shard and its part, an image, a single file."""

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.evidence.files import open_regular
from everstep.hashing import Hasher, hash_of
from trainer_sdk.checkpoint.image_folder import put_durably, sync_file, sync_names
from trainer_sdk.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    BadManifestError,
    ImageEntry,
    ImageIndex,
    Manifest,
    RankPart,
    ShardFile,
    decode,
    encode,
    step_name,
)
from trainer_sdk.checkpoint.storage import lasting, storage_for
from trainer_sdk.checkpoint.storage.folder import Folder, sync_folder
from trainer_sdk.checkpoint.storage.names import SAVING
from trainer_sdk.checkpoint.storage.port import MissingError, Storage
from trainer_sdk.checkpoint.writer.disk import (
    CHUNK_BYTES,
    Going,
    StreamHash,
    WriteGate,
    hash_in_parts,
    write_hashed,
)
from trainer_sdk.checkpoint.writer.protocol import WriteState

_ABOVE_RANK = 2
"""The number of folders to sync above a rank's folder: `own/`, and the folder of its agent."""
_SAVING = ".everstep-saving"
_MOST_OF_NAME = 50
"""The characters, of at most four bytes each, that a temporary name keeps of the file's name."""
_LEFT_S = 3600.0
"""The least age of a file to remove, as locks may not work across nodes."""
_cleared: set[str] = set()


@dataclass(frozen=True, slots=True)
class SavePlace:
    """Where the files of a save are, before and after it is visible."""

    storage: Storage
    step: str
    """Its name once it is visible."""
    before: str
    """The folder in which its files are written."""
    inside: str
    """The prefix of the files' names in the manifest."""

    def path(self, name: str) -> str:
        """The path of a file, for people."""
        return f"{self.storage.url}/{self.before}/{name}"


def place_of(root: str, saving: str, step: int) -> SavePlace:
    """The place of a save: a hidden folder; in an object store, a prefix below the step."""
    storage, name = storage_for(root), step_name(step)
    if isinstance(storage, Folder):
        return SavePlace(storage, name, f"{SAVING}/{saving}", "")
    return SavePlace(storage, name, f"{name}/{saving}", f"{saving}/")


FAILURE = "failed-"


def part_name(rank: int) -> str:
    """The name of the file that lists what a rank has made durable."""
    return f"part-{rank:05d}.json"


def failure_name(rank: int) -> str:
    """The name of the file with the reason why a rank has given up."""
    return f"{FAILURE}{rank:05d}.json"


def part_of(place: SavePlace, rank: int) -> RankPart | None:
    """The part of a rank, until the checkpoint is visible; None if it is not there."""
    name = f"{place.before}/{part_name(rank)}"
    try:
        return decode(place.storage.read(name), RankPart, f"{place.storage.url}/{name}")
    except MissingError:
        return None


def visible(place: SavePlace) -> tuple[Manifest, str] | None:
    """The visible checkpoint of the step, and the hash of its manifest; None if there is none."""
    name = f"{place.step}/{MANIFEST}"
    try:
        octets = place.storage.read(name)
        manifest = decode(octets, Manifest, f"{place.storage.url}/{name}")
    except (MissingError, BadManifestError):
        return None
    return manifest, hash_of(octets)


def is_ours(there: Manifest, order: WriteState) -> bool:
    """Whether this save has made it visible."""
    return there.saving == order.saving


def write_shard(
    order: WriteState,
    windows: Iterable[memoryview],
    hashing: StreamHash,
    gate: WriteGate,
    going: Going,
) -> float:
    """Write a rank's shard, hash it, and write its part; returns how long that took.

    Files that an earlier attempt has made durable are not touched: rank 0 may be publishing them.
    """
    place, began = place_of(order.root, order.saving, order.identity.step), time.monotonic()
    if _is_durable(order, place):
        _hash(windows, hashing, gate, going)
        return time.monotonic() - began
    if isinstance(place.storage, Folder):
        with _whole(os.path.join(place.storage.path, place.before), order) as path:
            write_hashed(path, order.file_bytes, windows, hashing, gate, going)
    else:
        if order.keep:  # hash the image first: it is needed sooner than the upload ends
            windows = tuple(windows)
            _hash(windows, hashing, gate, going)
        parts = _parts(windows, gate, going)
        name = f"{place.before}/{order.shard}"
        place.storage.put(name, parts if order.keep else _hashed(parts, hashing))
    file = ShardFile(name=order.shard, size_bytes=order.file_bytes, hash=hashing.hexdigest())
    part = RankPart(
        identity=order.identity,
        rank=order.rank,
        files=(file,),
        stall_s=gate.stall_s,
        write_s=time.monotonic() - began,
    )
    place.storage.put(f"{place.before}/{part_name(order.rank)}", (encode(part),))
    return part.write_s


def _is_durable(order: WriteState, place: SavePlace) -> bool:
    """Whether an earlier attempt has written this rank's part, which may be published already."""
    if part_of(place, order.rank) is not None:
        return True
    published = visible(place)
    return published is not None and is_ours(published[0], order)


@contextmanager
def _whole(folder: str, order: WriteState) -> Generator[str]:
    """A temporary path for a shard, which is renamed when it is complete, and else removed.

    An earlier attempt may still write its part: its writer may hang where even SIGKILL waits.
    """
    for made in (os.path.dirname(folder), folder):  # the root is there, or has vanished
        with suppress(FileExistsError):
            os.mkdir(made)
    path = os.path.join(folder, f".{order.shard}")
    with suppress(FileNotFoundError):
        os.unlink(path)  # an earlier writer may still write to it
    try:
        yield path
        os.replace(path, os.path.join(folder, order.shard))
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
            # Keep the folder for several ranks: another may be about to report its failure in it.
            if order.identity.world_size == 1:
                os.rmdir(folder)
        raise


def keep_image(order: WriteState, octets: memoryview, hasher: Hasher, going: Going) -> str:
    """Hash the rest of an image, make it durable, and write its index; returns the hash."""
    hash_in_parts(octets[order.file_bytes : order.image_bytes], hasher, going)
    begin, length = order.entries
    index = ImageIndex(
        identity=order.identity,
        rank=order.rank,
        size_bytes=order.image_bytes,
        hash=hasher.hexdigest(),
        entries=msgspec.json.decode(octets[begin : begin + length], type=tuple[ImageEntry, ...]),
    )
    sync_file(order.image, going)  # a process that sees the index may rely on the whole image
    put_durably(Path(order.folder) / INDEX, encode(index))
    sync_names(os.path.dirname(order.folder), _ABOVE_RANK)
    return index.hash


def _hash(
    windows: Iterable[memoryview], hashing: StreamHash, gate: WriteGate, going: Going
) -> None:
    for octets in windows:
        gate.wait_for(len(octets))
        hash_in_parts(octets, hashing, going)


def _parts(windows: Iterable[memoryview], gate: WriteGate, going: Going) -> Iterator[bytes]:
    """The chunks as copies: the client may still read a chunk after the window has changed."""
    passed = 0
    for octets in windows:
        for at in range(0, len(octets), CHUNK_BYTES):
            begin, passed = passed, passed + len(octets[at : at + CHUNK_BYTES])
            gate.let(begin, passed)
            yield bytes(octets[at : at + CHUNK_BYTES])
            going()


def _hashed(parts: Iterable[bytes], hashing: StreamHash) -> Iterator[bytes]:
    for part in parts:
        hashing.update(part)
        yield part


def write_file(path: str, octets: memoryview, size: int, going: Going) -> None:
    """Write the first `size` bytes; `octets` extends to the end of the last page."""
    folder, _, name = path.rpartition("/")
    if "://" in path:
        parts = (octets[at : min(at + CHUNK_BYTES, size)] for at in range(0, size, CHUNK_BYTES))
        storage_for(lasting(folder)).put(name, parts)
        return
    with _held(f"{folder}/.{name[:_MOST_OF_NAME]}.{os.getpid()}{_SAVING}") as temporary:
        _clear(folder or "/", os.stat(temporary).st_mtime)
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        write_hashed(temporary, whole, (octets[:whole],), None, WriteGate(whole), going)
        _cut(temporary, size)
        _liken(temporary, path)
        os.replace(temporary, path)
        sync_folder(folder or "/")


@contextmanager
def _held(path: str) -> Generator[str]:
    """Create a temporary file, whose lock shows that its writer lives."""
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks, on which nothing is removed
            fcntl.flock(held, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held), os.stat(path)):
                break
        os.close(held)  # another writer has just removed it
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(held)


def _clear(folder: str, now: float) -> None:
    """Remove, once, the temporary files of killed writers. `now` is by the storage's clock."""
    if folder in _cleared:
        return
    _cleared.add(folder)
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(_SAVING)]
    for path in (os.path.join(folder, name) for name in names if name.startswith(".")):
        with suppress(OSError), open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if now - os.fstat(file.fileno()).st_mtime > _LEFT_S:
                os.unlink(path)


def _liken(new: str, old: str) -> None:
    """Give the new file the owner and mode of the old one."""
    with suppress(FileNotFoundError):
        about = os.stat(old)
        with suppress(PermissionError):
            os.chown(new, about.st_uid, about.st_gid)
        os.chmod(new, stat.S_IMODE(about.st_mode))


def _cut(path: str, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
