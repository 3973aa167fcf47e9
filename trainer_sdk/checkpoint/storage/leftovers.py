"""Leftovers: files of failed saves, and quarantined checkpoints that were replaced.

No restore reads them. A save in progress looks the same, so only files count that have not changed
for long, by the clock of the storage itself, and whose names only saves and copies use.
"""

from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime

from trainer_sdk.checkpoint.manifest import MANIFEST, BadManifestError, Manifest, decode, step_of
from trainer_sdk.checkpoint.storage.checkpoints import PINNED
from trainer_sdk.checkpoint.storage.names import (
    REPLACED,
    SAVING,
    pulling_of,
    replaced_of,
    saving_of,
)
from trainer_sdk.checkpoint.storage.port import MissingError, Storage

ABANDONED_S = 86_400.0
"""Longer than any save may take: files that have not changed since are not in use."""
_REPLACED_S = 7 * 86_400.0
_NOTHING = "its save has failed"
_MADE_ROOM = "it was quarantined, and another save has its place"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder, or prefix, that is not needed."""

    step: int
    folder: str
    """Its name in the storage."""
    size_bytes: int
    changed_at: datetime
    """The time of its newest file."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Found:
    step: int
    folder: str
    after_s: float
    reason: str = _NOTHING


def leftovers(
    storage: Storage, *, after_s: float = ABANDONED_S, live_round: int | None = None
) -> list[Leftover]:
    """The leftovers: unchanged for `after_s`, and not of a running round. Reads no shard."""
    remains: list[Leftover] = []
    now: datetime | None = None
    for candidate in _candidates(storage, after_s, live_round):
        files = storage.files(candidate.folder)
        if not files:
            continue
        now = now or storage.now()
        changed_at = max(file.changed_at for file in files)
        idle_s = (now - changed_at).total_seconds()
        if idle_s > candidate.after_s:
            size = sum(file.size_bytes for file in files)
            reason = f"{candidate.reason}, and nothing has changed in it for {idle_s / 3600:.0f} h"
            remains.append(Leftover(candidate.step, candidate.folder, size, changed_at, reason))
    return sorted(remains, key=lambda leftover: (leftover.step, leftover.folder), reverse=True)


def sweep(storage: Storage, leftover: Leftover) -> int | None:
    """Remove a leftover; returns the freed bytes. None if a file in it has changed meanwhile."""
    if any(file.changed_at > leftover.changed_at for file in storage.files(leftover.folder)):
        return None
    return storage.remove(leftover.folder)


def _candidates(storage: Storage, after_s: float, live_round: int | None) -> Generator[_Found]:
    for name in storage.folders():
        step = step_of(name)
        if step is not None:
            yield from _below(storage, step, name, after_s, live_round)
    for name in storage.folders(SAVING):
        saving = saving_of(name)
        pulled = pulling_of(name)
        if saving is not None and not _is_live(saving.round, live_round):
            yield _Found(saving.step, f"{SAVING}/{name}", after_s)
        elif pulled is not None:
            yield _Found(pulled, f"{SAVING}/{name}", after_s, "it was copied in part")
    for name in storage.folders(REPLACED):
        replaced = replaced_of(name)
        if replaced is not None and storage.size(f"{REPLACED}/{name}/{PINNED}") is None:
            yield _replaced(replaced, f"{REPLACED}/{name}", after_s)


def _below(
    storage: Storage, step: int, name: str, after_s: float, live_round: int | None
) -> Generator[_Found]:
    """The hidden saves of a step in an object store."""
    savings = [(folder, saving_of(folder)) for folder in storage.folders(name)]
    ours = [
        folder
        for folder, saving in savings
        if saving is not None and saving.step == step and not _is_live(saving.round, live_round)
    ]
    if not ours:
        return
    manifest = f"{name}/{MANIFEST}"
    try:
        files = decode(storage.read(manifest), Manifest, manifest).files
    except MissingError:
        files = ()
    except BadManifestError:
        return  # its files are unknown
    needed = {file.name.partition("/")[0] for file in files}
    for hidden in ours:
        folder = f"{name}/{hidden}"
        if hidden in needed:
            continue
        if storage.size(f"{folder}/{MANIFEST}") is None:
            yield _Found(step, folder, after_s)
        elif storage.size(f"{folder}/{PINNED}") is None:
            yield _replaced(step, folder, after_s)


def _replaced(step: int, folder: str, after_s: float) -> _Found:
    return _Found(step, folder, max(after_s, _REPLACED_S), _MADE_ROOM)


def _is_live(round_: int, live_round: int | None) -> bool:
    return live_round is not None and round_ >= live_round
