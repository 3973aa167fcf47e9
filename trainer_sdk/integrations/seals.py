"""Seals: hashes of checkpoints that a framework writes itself, so that a resume can verify them.

A seal is a small file that is written after a checkpoint is complete: in its folder, or next to it
if it is a single file. A checkpoint with a seal that matches is whole and unchanged. One without a
seal may be torn, or older than the seals.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from everstep.evidence.files import open_regular, read_regular
from everstep.hashing import Hasher
from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.storage.folder import sync_folder
from trainer_sdk.sdk_log import warn

SEAL = "everstep-seal.json"
_SUFFIX = ".everstep-seal"
_BLOCK_BYTES = 8 << 20
_NAMED = 3

SealState = Literal["good", "damaged", "unsealed", "quarantined"]


class SealedFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint, as it was when the seal was made."""

    name: str
    size_bytes: int
    hash: str


class Seal(msgspec.Struct, frozen=True):
    """The files of a checkpoint."""

    step: int
    files: tuple[SealedFile, ...]
    version: int = 1
    quarantined: str = ""
    """Why nobody should resume from it, although its bytes are right."""


@dataclass(frozen=True, slots=True)
class SealedCheckpoint:
    """A checkpoint of a framework, and whether its bytes are what was sealed."""

    path: str
    step: int
    state: SealState
    reason: str = ""


def seal(path: "str | os.PathLike[str]", step: int) -> Seal:
    """Make a complete checkpoint durable, and write its seal; `path` is a folder or a file."""
    path = os.fspath(path)
    files = []
    for name, place in _files(path):
        digest, size = _hash(place, is_durable=True)
        files.append(SealedFile(name, size, digest))
    made = Seal(step, tuple(files))
    _put(_place_of(path), msgspec.json.encode(made))
    return made


def unseal(path: "str | os.PathLike[str]") -> None:
    """Remove the seal of a checkpoint that is about to change."""
    try:
        os.unlink(_place_of(os.fspath(path)))
    except FileNotFoundError:
        return


def check(path: "str | os.PathLike[str]") -> SealedCheckpoint:
    """Read every byte of a checkpoint, and compare it with its seal."""
    path = os.fspath(path)
    try:
        made = msgspec.json.decode(read_regular(_place_of(path)), type=Seal)
    except FileNotFoundError:
        return SealedCheckpoint(path, -1, "unsealed", "it has no seal: its save may be torn")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return SealedCheckpoint(path, -1, "unsealed", f"its seal cannot be read: {error}")
    if made.quarantined:
        return SealedCheckpoint(path, made.step, "quarantined", made.quarantined)
    for expected in made.files:
        place = path if not expected.name else os.path.join(path, expected.name)
        flaw = _flaw(place, expected)
        if flaw:
            return SealedCheckpoint(path, made.step, "damaged", flaw)
    return SealedCheckpoint(path, made.step, "good")


def quarantine(
    folder: "str | os.PathLike[str]", prefix: str, suffix: str, *, from_step: int, reason: str
) -> None:
    """Mark the sealed checkpoints of a folder from this step on, so that no resume uses them."""
    for path in _newest_first(os.fspath(folder), prefix, suffix):
        made = _seal_of(path)
        if made is not None and made.step >= from_step and not made.quarantined:
            marked = msgspec.structs.replace(made, quarantined=reason)
            _put(_place_of(path), msgspec.json.encode(marked))


def has_good(folder: "str | os.PathLike[str]", prefix: str, suffix: str, *, below: int) -> bool:
    """Whether a folder has a good checkpoint of a step below this."""
    paths = _newest_first(os.fspath(folder), prefix, suffix, below)
    return any(check(path).state == "good" for path in paths)


def newest_verified(
    folder: "str | os.PathLike[str]",
    prefix: str = "checkpoint-",
    suffix: str = "",
    *,
    below: int | None = None,
) -> str | None:
    """The newest good checkpoint `PREFIX…SUFFIX` of a folder; None if there is no checkpoint.

    If none has a seal, because all are from before Everstep, it is the newest one, and a warning
    says that it is not verified. With `below`, only checkpoints of earlier steps count. It reads
    the checkpoint once: call it on each node's first rank, or on all ranks. `FileNotFoundError` if
    there are checkpoints, and all are damaged, torn or quarantined.
    """
    folder = arguments.path("folder", folder)
    refused: list[SealedCheckpoint] = []
    for path in _newest_first(folder, prefix, suffix, below):
        checked = check(path)
        if checked.state == "good":
            _report(refused, path)
            return path
        refused.append(checked)
    if not refused:
        return None
    if all(checked.state == "unsealed" for checked in refused):
        warn(f"{refused[0].path} is not verified, as no checkpoint there has a seal of Everstep")
        return refused[0].path
    raise FileNotFoundError(
        f"no checkpoint in {folder} can be used: "
        + "; ".join(f"{checked.path}: {checked.reason}" for checked in refused[:_NAMED])
        + "; move them away to begin from scratch"
    )


def step_of(path: "str | os.PathLike[str]") -> int | None:
    """The step at the end of a checkpoint's name; None if there is none."""
    name = os.path.basename(os.fspath(path).rstrip("/"))
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else None


def _newest_first(folder: str, prefix: str, suffix: str, below: int | None = None) -> list[str]:
    """The checkpoints of a folder, by their steps: those of seals, or else those of their names."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    ordered = []
    for name in names:
        middle = name.removeprefix(prefix).removesuffix(suffix)
        is_whole = name.startswith(prefix) and name.endswith(suffix)
        if is_whole and (suffix or middle.isdecimal()):
            path = os.path.join(folder, name)
            step = _sealed_step(path, middle)
            if below is None or step < below:
                ordered.append((step, os.path.getmtime(path), path))
    return [path for *_, path in sorted(ordered, reverse=True)]


def _sealed_step(path: str, name: str) -> int:
    made = _seal_of(path)
    if made is not None:
        return made.step
    return -1 if (step := step_of(name)) is None else step


def _seal_of(path: str) -> Seal | None:
    try:
        return msgspec.json.decode(read_regular(_place_of(path)), type=Seal)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _report(refused: list[SealedCheckpoint], chosen: str) -> None:
    for checked in refused:
        warn(f"{checked.path} is not used: {checked.reason}; the training resumes from {chosen}")


def _files(path: str) -> Iterator[tuple[str, str]]:
    """Each file of a checkpoint: its name in it, and its path. The order is the same each time."""
    if not os.path.isdir(path):
        yield "", path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            place = os.path.join(folder, name)
            if name != SEAL and os.path.isfile(place):
                yield os.path.relpath(place, path), place


def _place_of(path: str) -> str:
    return os.path.join(path, SEAL) if os.path.isdir(path) else path + _SUFFIX


def _hash(place: str, *, is_durable: bool = False) -> tuple[str, int]:
    hasher, size = Hasher(), 0
    with open_regular(place) as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
            size += len(block)
        if is_durable:
            os.fsync(file.fileno())
    return hasher.hexdigest(), size


def _flaw(place: str, expected: SealedFile) -> str:
    try:
        digest, size = _hash(place)
    except OSError as error:
        return f"{place} cannot be read: {error.strerror}"
    if size != expected.size_bytes:
        return f"{place} has {size} bytes, and {expected.size_bytes} were saved"
    return "" if digest == expected.hash else f"{place} differs from what was saved"


def _put(place: str, octets: bytes) -> None:
    """Write a file durably; it appears whole or not at all."""
    before = f"{place}.{os.getpid()}"
    with open(before, "wb") as file:
        file.write(octets)
        file.flush()
        os.fsync(file.fileno())
    os.replace(before, place)
    sync_folder(os.path.dirname(os.path.abspath(place)))
