"""Finds and adopts plain checkpoints of torch.distributed.checkpoint, without a manifest.

A plain checkpoint has torch's metadata and no manifest, so it may be incomplete; it is adopted only
on request.
"""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec

from everstep.evidence.files import open_regular
from everstep.hashing import Hasher
from trainer_sdk.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Identity,
    Manifest,
    ShardFile,
    encode,
    step_name,
)
from trainer_sdk.checkpoint.storage.checkpoints import OWNER, RootOwner, owner_of
from trainer_sdk.checkpoint.storage.folder import Folder, sync_folder
from trainer_sdk.checkpoint.storage.names import SAVING, pulling_name
from trainer_sdk.checkpoint.storage.port import Storage, StorageError
from trainer_sdk.checkpoint.storage.stored_content import ADOPTED, content_flaw

_SHARD = ".distcp"
_READ_BYTES = 8 << 20
_MOST = 64


def plain_checkpoints(storage: Storage) -> list[str]:
    """The places of plain checkpoints: this place itself, and the folders in it."""
    places = [storage.url] if storage.size(METADATA) is not None else []
    names = sorted(storage.folders())[-_MOST:]
    return places + [f"{storage.url}/{name}" for name in names if _is_plain(storage, name)]


def offer(storage: Storage) -> str:
    """A line about how to adopt the plain checkpoints there; empty if there are none."""
    places = plain_checkpoints(storage)
    if not places:
        return ""
    newest = places[-1]
    step = _step_in(newest)
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return (
        f"{newest}{more} has a checkpoint of torch.distributed.checkpoint without a manifest: "
        f"everstep ckpt adopt {newest} {storage.url} --step {step} takes it over"
    )


def adopt(source: str, root: str, step: int, job: str) -> tuple[str, int]:
    """Make a checkpoint of the root from a plain checkpoint; returns its place and size.

    Its files are hashed, and linked, or copied to another file system; the source stays. A plain
    checkpoint that is not whole, or has a value that no restore reads, is refused.
    """
    folder, name, names = Folder(root), step_name(step), _files_of(source)
    sizes = {name: _regular_size(os.path.join(source, name)) for name in names}
    if flaw := content_flaw(Folder(source), METADATA, sizes, is_adopted=True):
        raise StorageError(f"{flaw}: adopt another checkpoint")
    if not folder.put_if_absent(OWNER, msgspec.json.encode(RootOwner(job))):
        raise StorageError(f"{folder.path} has checkpoints of {owner_of(folder)}: give that --job")
    hidden = f"{SAVING}/{pulling_name(name)}"
    inside = os.path.join(folder.path, hidden)
    try:
        with _clear_errors(source):
            os.makedirs(inside, exist_ok=True)
            files = tuple(_taken(source, inside, file_name) for file_name in names)
        identity = Identity(job=job, round=0, step=step, world_size=_ranks(names), layout=ADOPTED)
        manifest = Manifest(
            identity=identity,
            files=files,
            saved_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            occasion="adopted",
            is_readable=True,
        )
        folder.put(f"{hidden}/{MANIFEST}", (encode(manifest),))
        if not folder.publish(hidden, name):
            raise StorageError(f"{folder.path}/{name} is there already: give another --step")
    finally:
        folder.remove(hidden)
    return f"{folder.path}/{name}", manifest.size_bytes


def _is_plain(storage: Storage, name: str) -> bool:
    if storage.size(f"{name}/{METADATA}") is None:
        return False
    return storage.size(f"{name}/{MANIFEST}") is None


def _files_of(source: str) -> list[str]:
    with _clear_errors(source):
        names = sorted(name for name in os.listdir(source) if name.endswith(_SHARD))
    if not names or not os.path.isfile(os.path.join(source, METADATA)):
        raise StorageError(
            f"{source} is not a checkpoint of torch.distributed.checkpoint: it needs {METADATA} "
            f"and files that end in {_SHARD}"
        )
    return [*names, METADATA]


def _regular_size(path: str) -> int:
    """The size of a file; `StorageError` if it is a link, which would lead out of the root."""
    with _clear_errors(path):
        if os.path.islink(path):
            raise OSError(errno.ELOOP, f"it is a link to {os.readlink(path)}: put the file there")
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size


def _taken(source: str, inside: str, name: str) -> ShardFile:
    target = os.path.join(inside, name)
    try:
        os.link(os.path.join(source, name), target)
    except OSError:
        shutil.copyfile(os.path.join(source, name), target)
    hasher = Hasher()
    with open_regular(target) as file:
        while piece := file.read(_READ_BYTES):
            hasher.update(piece)
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    sync_folder(inside)
    return ShardFile(name=name, size_bytes=size, hash=hasher.hexdigest())


def _ranks(names: list[str]) -> int:
    """The number of ranks that have saved it, by the names of torch's files."""
    return max(1, len({name.split("_")[2] for name in names if name.startswith("__")}))


@contextmanager
def _clear_errors(place: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{place} cannot be taken over: {error.strerror}") from error


def _step_in(name: str) -> str:
    """The number that the name of a folder ends with, as in `ckpt-500`; else `N`."""
    return name[len(name.rstrip("0123456789")) :].lstrip("0") or "N"
