"""The checkpoints in a storage of the global tier: lists, verifies, marks and copies them.

It needs neither a service nor torch: the files have all information.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from everstep.hashing import ALGORITHM, Hasher, hash_of
from trainer_sdk.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    BadManifestError,
    Manifest,
    ShardFile,
    decode,
    encode,
    step_name,
    step_of,
)
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.names import SAVING, pulling_name
from trainer_sdk.checkpoint.storage.optimizer_steps import doubt_about_steps
from trainer_sdk.checkpoint.storage.port import (
    IrregularFileError,
    MissingError,
    Octets,
    Storage,
    StorageError,
    size_flaw,
)
from trainer_sdk.checkpoint.storage.stored_content import ADOPTED, content_flaw

OWNER = "owner.json"
PINNED = "pinned.json"
"""Next to a manifest: retention keeps it."""
QUARANTINED = "quarantined.json"
"""Next to a manifest: it must not be restored."""
_READ_BYTES = 8 << 20

Pace = Callable[[int], None]
"""Called with the size of each read; it may wait, or raise to stop."""


class CheckpointMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A mark of a checkpoint, next to its manifest."""

    by: str = ""
    reason: str = ""
    cause: str = ""
    at: str = ""
    failed_at: int | None = None
    """The step whose loss was not finite, if a training has quarantined it."""
    manifest_hash: str = ""
    """The hash of the marked manifest; empty if the mark is valid for any manifest."""

    def is_about(self, manifest_hash: str) -> bool:
        """Whether the mark applies to the checkpoint with this manifest."""
        return self.manifest_hash in ("", manifest_hash)


class RootOwner(msgspec.Struct, frozen=True):
    """The job that owns a place of checkpoints."""

    job: str


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A visible checkpoint."""

    step: int
    path: str
    """Where its manifest is."""
    manifest: Manifest | None
    manifest_hash: str = ""
    flaw: str = ""
    """Why its manifest cannot be used."""
    pinned: CheckpointMark | None = None
    quarantined: CheckpointMark | None = None

    @property
    def saved_at(self) -> datetime | None:
        """When it was saved, by its manifest; None without a time zone."""
        try:
            at = datetime.fromisoformat(self.manifest.saved_at if self.manifest else "")
        except ValueError:
            return None
        return at if at.tzinfo is not None else None


class GoneError(MissingError):
    """The checkpoint was removed or replaced while it was read, so its state is unknown."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of reading a checkpoint again."""

    flaw: str
    """The damage, with its file; empty if every byte is what was saved."""
    size_bytes: int
    """How many bytes were read."""
    doubt: str = ""
    """Why the state may not have been right when it was saved; empty if nothing is known."""

    @property
    def is_good(self) -> bool:
        """Whether every byte is what was saved."""
        return not self.flaw


def owner_of(storage: Storage) -> str | None:
    """The job that owns the storage; None if it has no owner."""
    mark = _read(storage, OWNER, RootOwner)
    return None if mark is None else mark.job


def stored_checkpoints(storage: Storage) -> Sequence[StoredCheckpoint]:
    """All visible checkpoints, the newest first."""
    steps = ((step_of(name), name) for name in storage.folders())
    checkpoints = (look(storage, step) for step, name in steps if step is not None and name)
    return sorted(
        (checkpoint for checkpoint in checkpoints if checkpoint is not None),
        key=lambda checkpoint: checkpoint.step,
        reverse=True,
    )


def look(storage: Storage, step: int) -> StoredCheckpoint | None:
    """The visible checkpoint of a step; None if there is none.

    Its marks are read before its manifest: a save that replaces the checkpoint first invalidates
    its marks, and removes them later.
    """
    folder = step_name(step)
    place = f"{storage.url}/{folder}"
    pinned = _read(storage, f"{folder}/{PINNED}", CheckpointMark)
    quarantined = _read(storage, f"{folder}/{QUARANTINED}", CheckpointMark)
    try:
        octets = storage.read(f"{folder}/{MANIFEST}")
    except MissingError:
        return None
    except IrregularFileError as error:
        return StoredCheckpoint(step, place, None, "", str(error), pinned, quarantined)
    manifest, flaw = None, ""
    try:
        manifest = decode(octets, Manifest, f"{place}/{MANIFEST}")
    except BadManifestError as error:
        flaw = str(error)
    else:
        if manifest.identity.step != step:
            flaw = f"{place}/{MANIFEST} is of step {manifest.identity.step}"
    hash_ = hash_of(octets)
    if quarantined is not None and not quarantined.is_about(hash_):
        quarantined = None
    return StoredCheckpoint(step, place, manifest, hash_, flaw, pinned, quarantined)


def flaw_of_sizes(storage: Storage, checkpoint: StoredCheckpoint) -> str:
    """The damage that shows without reading: a file that is missing or has another size.

    `GoneError` if the checkpoint is removed meanwhile, which is not damage.
    """
    if checkpoint.manifest is None or checkpoint.flaw:
        return checkpoint.flaw
    folder = step_name(checkpoint.step)
    for file in checkpoint.manifest.files:
        if flaw := size_flaw(storage, f"{folder}/{file.name}", file.size_bytes):
            _still_there(storage, checkpoint)
            return flaw
    return ""


def verify(
    storage: Storage, checkpoint: StoredCheckpoint, pace: Pace = lambda _: None
) -> Verification:
    """Read and verify every byte. `GoneError` if it is removed meanwhile, which is not damage.

    Earlier releases did not check values when they saved, nor whether what they adopted was whole:
    that is checked here, and what a restore would refuse is damage.
    """
    if checkpoint.manifest is None or checkpoint.flaw:
        return Verification(checkpoint.flaw, 0)
    read = 0
    for file in checkpoint.manifest.files:
        flaw, size = _verify_file(storage, checkpoint.step, file, pace)
        read += size
        if flaw:
            _still_there(storage, checkpoint)
            return Verification(flaw, read)
    if flaw := _content_flaw(storage, checkpoint, checkpoint.manifest):
        _still_there(storage, checkpoint)
        return Verification(flaw, read)
    return Verification("", read, _doubt(storage, checkpoint, checkpoint.manifest))


def _doubt(storage: Storage, checkpoint: StoredCheckpoint, manifest: Manifest) -> str:
    try:
        return doubt_about_steps(storage, step_name(checkpoint.step), _described(manifest))
    except Exception:  # noqa: BLE001 - every byte is good: an unusual form is not suspicious
        return ""


def _described(manifest: Manifest) -> str:
    """The name of torch's metadata; empty if there is none."""
    return next((file.name for file in manifest.files if _flat(file.name) == METADATA), "")


def _content_flaw(storage: Storage, checkpoint: StoredCheckpoint, manifest: Manifest) -> str:
    """What a restore would not find in it, where no save of ours has made that sure."""
    is_adopted = manifest.identity.layout == ADOPTED
    if manifest.is_readable and not is_adopted:
        return ""
    if not (described := _described(manifest)):
        return f"{checkpoint.path} has no {METADATA}"
    folder = step_name(checkpoint.step)
    sizes = {f"{folder}/{file.name}": file.size_bytes for file in manifest.files}
    return content_flaw(storage, f"{folder}/{described}", sizes, is_adopted=is_adopted)


def mark(storage: Storage, step: int, name: str, content: CheckpointMark) -> None:
    """Write a mark next to the manifest; the checkpoint itself is not changed.

    `MissingError` if its folder is gone: a new folder would block the name for later saves.
    """
    storage.put_beside(f"{step_name(step)}/{name}", msgspec.json.encode(content))


def quarantine(storage: Storage, checkpoint: StoredCheckpoint, reason: CheckpointMark) -> bool:
    """Quarantine a checkpoint; False if it was quarantined already.

    Also False if the mark is about another manifest, or the checkpoint is gone.
    """
    if checkpoint.quarantined is not None or not reason.is_about(checkpoint.manifest_hash):
        return False
    try:
        mark(
            storage,
            checkpoint.step,
            QUARANTINED,
            replace(reason, manifest_hash=checkpoint.manifest_hash),
        )
    except MissingError:
        return False
    return True


def unmark(storage: Storage, step: int, name: str) -> None:
    """Remove a mark."""
    storage.delete(f"{step_name(step)}/{name}")


def pull(
    storage: Storage, checkpoint: StoredCheckpoint, to: str, pace: Pace = lambda _: None
) -> tuple[str, Verification]:
    """Copy a checkpoint into a local folder, comparing every byte; returns its path there.

    It is visible there only once it is whole and good. `GoneError` if it is removed meanwhile.
    """
    folder, name = Folder(to), step_name(checkpoint.step)
    if checkpoint.manifest is None or checkpoint.flaw:
        return "", Verification(checkpoint.flaw, 0)
    if folder.size(f"{name}/{MANIFEST}") is not None:
        raise StorageError(f"{folder.path}/{name} is there already: remove it, or pull elsewhere")
    job = checkpoint.manifest.identity.job
    if not folder.put_if_absent(OWNER, msgspec.json.encode(RootOwner(job))):
        raise StorageError(f"{folder.path} has checkpoints of {owner_of(folder)}, not of {job}")
    hidden, read = f"{SAVING}/{pulling_name(name)}", 0
    try:
        for file in checkpoint.manifest.files:
            source = _Hashed(storage, f"{name}/{file.name}", file, pace)
            read += folder.put(f"{hidden}/{_flat(file.name)}", source.parts())
            if source.flaw:
                _still_there(storage, checkpoint)
                return "", Verification(source.flaw, read)
        folder.put(f"{hidden}/{MANIFEST}", (_flat_manifest(storage, checkpoint.manifest, name),))
        if not folder.publish(hidden, name):
            raise StorageError(f"{folder.path}/{name} was made meanwhile: nothing was changed")
    finally:
        folder.remove(hidden)
    return f"{folder.path}/{name}", Verification("", read)


def _flat(name: str) -> str:
    """The name without its folder: files have one in an object store, and torch expects none."""
    return name.rpartition("/")[2]


def _flat_manifest(storage: Storage, manifest: Manifest, folder: str) -> bytes:
    if all(file.name == _flat(file.name) for file in manifest.files):
        return storage.read(f"{folder}/{MANIFEST}")
    files = (msgspec.structs.replace(file, name=_flat(file.name)) for file in manifest.files)
    return encode(msgspec.structs.replace(manifest, files=tuple(files)))


def _still_there(storage: Storage, checkpoint: StoredCheckpoint) -> None:
    """`GoneError` if the checkpoint was removed or replaced; both change its manifest first."""
    there = look(storage, checkpoint.step)
    if there is None or there.manifest_hash != checkpoint.manifest_hash:
        event = "was removed" if there is None else "was replaced by another"
        raise GoneError(f"{checkpoint.path} {event} while it was read")


class _Hashed:
    """Reads a file, and compares it with what was saved."""

    def __init__(self, storage: Storage, name: str, file: ShardFile, pace: Pace) -> None:
        self._storage = storage
        self._name = name
        self._file = file
        self._pace = pace
        self.flaw = ""
        self.size = 0

    def parts(self) -> Generator[Octets]:
        """The bytes of the file in pieces; `flaw` is set after the last."""
        place = f"{self._storage.url}/{self._name}"
        hasher = Hasher()
        try:
            size = self._file.size_bytes
            self.flaw = size_flaw(self._storage, self._name, size)
            while not self.flaw and self.size < size:
                piece = self._storage.read(
                    self._name, self.size, min(_READ_BYTES, size - self.size)
                )
                hasher.update(piece)
                self.size += len(piece)
                self._pace(len(piece))
                yield piece
        except StorageError as error:
            self.flaw = str(error)
            return
        if not self.flaw and hasher.hexdigest() != self._file.hash:
            self.flaw = (
                f"{place} differs from what was saved: its {ALGORITHM} is {hasher.hexdigest()}, "
                f"and {self._file.hash} was recorded"
            )


def _verify_file(storage: Storage, step: int, file: ShardFile, pace: Pace) -> tuple[str, int]:
    source = _Hashed(storage, f"{step_name(step)}/{file.name}", file, pace)
    for _ in source.parts():
        pass
    return source.flaw, source.size


_Read = TypeVar("_Read")
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    of: msgspec.json.Decoder(of) for of in (RootOwner, CheckpointMark)
}


def _read(storage: Storage, name: str, of: type[_Read]) -> _Read | None:
    """Read a small document; None if there is none. A mark that cannot be read still counts."""
    try:
        return _DECODERS[of].decode(storage.read(name))  # type: ignore[no-any-return]
    except MissingError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, IrregularFileError) as error:
        if of is CheckpointMark:
            return msgspec.convert({"reason": f"{name} cannot be read: {error}"}, type=of)
        if isinstance(error, IrregularFileError):
            raise
        raise StorageError(f"{storage.url}/{name} is not what was written: {error}") from error
