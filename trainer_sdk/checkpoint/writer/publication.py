"""Makes a visible checkpoint of the ranks' parts: rank 0's writer publishes it, the others wait.

Ranks communicate only by files, so publication needs neither the training nor the control plane.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from everstep.hashing import hash_of
from trainer_sdk.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    BadManifestError,
    Identity,
    Manifest,
    RankPart,
    ShardFile,
    encode,
    step_name,
)
from trainer_sdk.checkpoint.storage.checkpoints import (
    PINNED,
    QUARANTINED,
    StoredCheckpoint,
    look,
    mark,
    unmark,
)
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.names import (
    REPLACED,
    SAVING,
    SavingName,
    replaced_name,
    saving_of,
)
from trainer_sdk.checkpoint.storage.port import MissingError, Storage, size_flaw
from trainer_sdk.checkpoint.writer.files import (
    FAILURE,
    SavePlace,
    failure_name,
    is_ours,
    part_name,
    part_of,
    place_of,
    visible,
)
from trainer_sdk.checkpoint.writer.protocol import SaveDone, WriteState

_MOST_IN_FLIGHT = 8
_OLD_S = 3600.0
_LOOK_FIRST_S = 0.005
_LOOK_LAST_S = 2.0
_MOST_LOOKS = 3
_LOOK_SLOWER = 1.1
"""The growth of the pause between two looks: an event is seen at most a tenth of the wait late."""

Seen = TypeVar("Seen")
ReportMissing = Callable[[Sequence[int]], None]
"""Called with the ranks whose parts are missing."""


class StepTakenError(Exception):
    """Another checkpoint of this step exists, and is not replaced."""


def why_given_up(there: StoredCheckpoint, order: WriteState, ours: Manifest) -> str:
    """Why this save is not needed; empty if it is needed."""
    manifest = there.manifest
    if manifest is None or manifest.identity.job != order.identity.job:
        return ""
    identity, step = manifest.identity, order.identity.step
    if identity.round > order.identity.round:
        before = f"round {identity.round} has saved step {step} there"
        if there.quarantined is None:
            before += " completely, and a visible checkpoint is never replaced"
        else:
            before += (
                f"; that is quarantined, but this is the earlier round {order.identity.round}, "
                f"which replaces nothing: to save the step anew, remove {there.path}"
            )
        return before
    if there.quarantined is not None:
        return ""
    before = f"round {identity.round} has saved step {step} there completely"
    if _content(manifest) == _content(ours):
        return f"{before}, with the same content"
    if _is_of_one_trainer(manifest, order):
        return (
            f"{before}, as this training did, and a visible checkpoint is never replaced: later "
            "changes are not in it"
        )
    return ""


def taken(there: StoredCheckpoint | None, order: WriteState, place: SavePlace) -> StepTakenError:
    """The error for a step whose name is taken: why, and what to do."""
    where = f"{place.storage.url}/{place.step}"
    if there is None:
        return StepTakenError(
            f"{where} has no {MANIFEST}, so it cannot be restored, and no save replaces it: "
            "remove it, or save elsewhere"
        )
    whose = there.flaw or "is another save of this step"
    if there.manifest is not None:
        identity = there.manifest.identity
        whose = f"is what round {identity.round} has saved"
        if identity.job != order.identity.job:
            whose = f"is of job {identity.job}"
    return StepTakenError(
        f"{where} {whose}, and a visible checkpoint is never replaced: to give it up, run "
        f"everstep ckpt quarantine {place.storage.url} {order.identity.step}; or save elsewhere"
    )


def replace_quarantined(
    there: StoredCheckpoint, order: WriteState, place: SavePlace, octets: bytes
) -> bool:
    """Replace a quarantined checkpoint by this one; False if it has changed."""
    if isinstance(place.storage, Folder):
        return _exchanged(place.storage, there, order, place)
    return _replaced(place.storage, there, octets)


def _exchanged(
    storage: Folder, there: StoredCheckpoint, order: WriteState, place: SavePlace
) -> bool:
    storage.exchange(place.before, place.step)
    if hash_of(storage.read(f"{place.before}/{MANIFEST}")) != there.manifest_hash:
        storage.exchange(place.before, place.step)  # another save has replaced it first
        return False
    storage.put_aside(place.before, f"{REPLACED}/{replaced_name(place.step, order.saving)}")
    return True


def _replaced(storage: Storage, there: StoredCheckpoint, octets: bytes) -> bool:
    """Replace a quarantined manifest; its mark gets the hash of that manifest first."""
    from trainer_sdk.checkpoint.storage.objects import Objects

    assert isinstance(storage, Objects)
    assert there.quarantined is not None
    folder = step_name(there.step)
    before = storage.read(f"{folder}/{MANIFEST}")
    if hash_of(before) != there.manifest_hash:
        return False
    why = replace(there.quarantined, manifest_hash=there.manifest_hash)
    mark(storage, there.step, QUARANTINED, why)
    inside = _folder_of(there.manifest)
    if inside:
        storage.put(f"{folder}/{inside}/{MANIFEST}", (before,))
        storage.put(f"{folder}/{inside}/{QUARANTINED}", (msgspec.json.encode(why),))
        if there.pinned is not None:
            storage.put(f"{folder}/{inside}/{PINNED}", (msgspec.json.encode(there.pinned),))
    if not storage.replace(f"{folder}/{MANIFEST}", octets, before):
        return False
    unmark(storage, there.step, QUARANTINED)
    if inside and there.pinned is not None:
        unmark(storage, there.step, PINNED)
    return True


def _folder_of(manifest: Manifest | None) -> str:
    """The folder of its files, below its step."""
    inside = "" if manifest is None else manifest.files[0].name.rpartition("/")[0]
    return inside if saving_of(inside) is not None else ""


def _is_of_one_trainer(manifest: Manifest, order: WriteState) -> bool:
    """Whether the training that saves now has saved it, in the same form."""
    theirs, own = saving_of(manifest.saving), saving_of(order.saving)
    if theirs is None or own is None or theirs.mark != own.mark:
        return False
    return manifest.identity == order.identity


def _content(manifest: Manifest) -> tuple[object, ...]:
    """A key that is equal for two saves of the same state, byte for byte."""
    names = ((file.name.rpartition("/")[2], file.size_bytes, file.hash) for file in manifest.files)
    shards = sorted(shard for shard in names if shard[0] != METADATA)
    identity = manifest.identity
    return identity.job, identity.world_size, identity.layout, shards


class GivenUpError(Exception):
    """Another rank has failed, or is too late."""

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late


def settle(order: WriteState, metadata: bytes, waiting: ReportMissing) -> SaveDone:
    """Wait until the checkpoint is visible; rank 0's writer publishes it."""
    place = place_of(order.root, order.saving, order.identity.step)
    if order.rank:
        return _wait_for_rank_0(order, place, waiting)
    parts, done = _all_parts(order, place, waiting)
    if done is not None:
        return _cleaned(order, place, done)
    place.storage.put(f"{place.before}/{METADATA}", (metadata,))
    about = ShardFile(name=METADATA, size_bytes=len(metadata), hash=hash_of(metadata))
    files = [*(file for part in parts for file in part.files), about]
    manifest = Manifest(
        identity=order.identity,
        files=tuple(msgspec.structs.replace(file, name=place.inside + file.name) for file in files),
        saved_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        occasion=order.occasion,
        has_data_position=order.has_data_position,
        user=order.user,
        saving=order.saving,
        is_readable=True,
    )
    return _publish(order, place, manifest)


def abandon(order: WriteState, reason: str) -> None:
    """Tell the other ranks, by a file, that this one has given up; it makes no new root for it."""
    place = place_of(order.root, order.saving, order.identity.step)
    if isinstance(place.storage, Folder) and not os.path.isdir(place.storage.path):
        return
    name = f"{place.before}/{failure_name(order.rank)}"
    place.storage.put(name, (json.dumps(reason).encode(),))


def remove_hidden(order: WriteState) -> None:
    """Remove what ranks have written for a save that rank 0 has given up: nobody publishes it.

    Rank 0 removes the files of all ranks, and the others what they wrote later. In an object store
    they stay: a manifest whose write seemed to fail may become visible later.
    """
    place = place_of(order.root, order.saving, order.identity.step)
    if not isinstance(place.storage, Folder):
        return
    if place.storage.size(f"{place.before}/{failure_name(0)}") is None:
        return
    own = {order.shard, part_name(order.rank)}
    for file in place.storage.files(place.before):
        name = file.name.rpartition("/")[2]
        is_whole = not name.startswith((FAILURE, "."))  # writers remove their unfinished files
        if name in own or (not order.rank and is_whole):
            place.storage.delete(file.name)


def _all_parts(
    order: WriteState, place: SavePlace, waiting: ReportMissing
) -> tuple[list[RankPart], SaveDone | None]:
    """The parts of all ranks; or the result, if an earlier attempt has published them."""
    parts_by_rank: dict[int, RankPart] = {}

    def parts() -> tuple[list[RankPart], SaveDone | None] | None:
        for rank in range(order.identity.world_size):
            if rank not in parts_by_rank and (part := part_of(place, rank)) is not None:
                _check(part, order.identity, place)
                parts_by_rank[rank] = part
        if len(parts_by_rank) == order.identity.world_size:
            return list(parts_by_rank.values()), None
        there = visible(place)
        return ([], _done(order, place, *there)) if there and is_ours(there[0], order) else None

    def missing() -> list[int]:
        return [rank for rank in range(order.identity.world_size) if rank not in parts_by_rank]

    return _until(parts, missing, order, place, waiting)


def _check(part: RankPart, identity: Identity, place: SavePlace) -> None:
    if part.identity != identity:
        raise BadManifestError(f"the part of rank {part.rank} is of another save: {part.identity}")
    for file in part.files:
        flaw = size_flaw(place.storage, f"{place.before}/{file.name}", file.size_bytes)
        if flaw:
            raise BadManifestError(flaw)


def _publish(order: WriteState, place: SavePlace, manifest: Manifest) -> SaveDone:
    octets = encode(manifest)
    if isinstance(place.storage, Folder):
        place.storage.put(f"{place.before}/{MANIFEST}", (octets,))
    return _cleaned(order, place, _made_visible(order, place, manifest, octets))


def _cleaned(order: WriteState, place: SavePlace, done: SaveDone) -> SaveDone:
    if isinstance(place.storage, Folder):
        _clean(place.storage, order.saving)
    elif done.given_up:
        _withdraw(order, place)
    return done


def _made_visible(
    order: WriteState, place: SavePlace, manifest: Manifest, octets: bytes
) -> SaveDone:
    done = _done(order, place, manifest, hash_of(octets))
    there: StoredCheckpoint | None = None
    for _ in range(_MOST_LOOKS):
        if _takes_the_name(place, octets):
            return done
        there = look(place.storage, order.identity.step)
        if there is None:
            continue  # it was just removed, or is not a checkpoint
        if there.manifest is not None and is_ours(there.manifest, order):
            return _done(
                order, place, there.manifest, there.manifest_hash
            )  # it was published before, and the answer was lost
        why = why_given_up(there, order, manifest)
        if there.manifest is not None and why:
            return _done(order, place, there.manifest, there.manifest_hash, why)
        if there.quarantined is None:
            break
        if replace_quarantined(there, order, place, octets):
            return done
    error = taken(there, order, place)
    _withdraw(order, place, str(error))
    raise error


def _takes_the_name(place: SavePlace, octets: bytes) -> bool:
    if isinstance(place.storage, Folder):
        return place.storage.publish(place.before, place.step)
    return place.storage.put_if_absent(f"{place.step}/{MANIFEST}", octets)


def _done(
    order: WriteState, place: SavePlace, manifest: Manifest, manifest_hash: str, given_up: str = ""
) -> SaveDone:
    return SaveDone(
        save=order.save,
        place=f"{place.storage.url}/{place.step}",
        size_bytes=manifest.size_bytes,
        shards=len(manifest.files) - 1,
        manifest_hash=manifest_hash,
        given_up=given_up,
    )


def _wait_for_rank_0(order: WriteState, place: SavePlace, waiting: ReportMissing) -> SaveDone:
    """Wait for the files of rank 0, which decides."""

    def seen() -> SaveDone | None:
        if (published := visible(place)) is None:
            return None
        if not is_ours(published[0], order):
            if part_of(place, order.rank) is not None:
                return None  # rank 0 has not decided yet
            # A replaced checkpoint vanishes with its parts in a single rename: read again.
            published = visible(place) or published
        manifest, hash_ = published
        if is_ours(manifest, order):
            return _done(order, place, manifest, hash_)
        _raise_failure(place, [0])
        why = f"rank 0 has given it up: round {manifest.identity.round} has saved it"
        return _done(order, place, manifest, hash_, why)

    return _until(seen, lambda: [0], order, place, waiting)


@dataclass(slots=True)
class _Wait:
    """The pause until the next look; it grows, as thousands may load the same server."""

    next_s: float = _LOOK_FIRST_S

    def pause(self) -> None:
        time.sleep(self.next_s)
        self.next_s = min(self.next_s * _LOOK_SLOWER, _LOOK_LAST_S)


def _until(
    look: Callable[[], Seen | None],
    missing: Callable[[], list[int]],
    order: WriteState,
    place: SavePlace,
    waiting: ReportMissing,
) -> Seen:
    wait, deadline = _Wait(), time.monotonic() + order.within_s
    while (seen := look()) is None:
        _raise_failure(place, missing())
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing()))
            raise GivenUpError(
                f"the part of rank {ranks} was not there within {order.within_s:g} s", is_late=True
            )
        waiting(missing())
        wait.pause()
    return seen


def _raise_failure(place: SavePlace, ranks: Sequence[int]) -> None:
    for rank in ranks:
        with suppress(MissingError):
            reason = json.loads(place.storage.read(f"{place.before}/{failure_name(rank)}"))
            raise GivenUpError(f"rank {rank} has given up: {reason}")


def _withdraw(order: WriteState, place: SavePlace, reason: str = "") -> None:
    """Remove the files of a save that stays hidden, but leave the reason for the other ranks."""
    kept = f"{place.before}/{failure_name(order.rank)}"
    if reason and order.identity.world_size > 1:
        abandon(order, reason)
    for file in place.storage.files(place.before):
        if file.name != kept:
            place.storage.delete(file.name)
    if isinstance(place.storage, Folder) and order.identity.world_size == 1:
        _clean(place.storage, order.saving)


def _clean(storage: Folder, saving: str) -> None:
    """Remove the files of failed saves, and of this one, if it stays hidden.

    The folder itself stays: the next save may just have found it.
    """
    base = os.path.join(storage.path, SAVING)
    for name in os.listdir(base):
        path = os.path.join(base, name)
        with suppress(OSError):
            left = _is_left(saving_of(name), saving_of(saving), os.stat(path).st_mtime)
            if name == saving or left:
                shutil.rmtree(path, ignore_errors=True)


def _is_left(theirs: SavingName | None, ours: SavingName | None, changed_at: float) -> bool:
    """Whether it is abandoned, by its name and age: no process can still write it."""
    if theirs is None or ours is None:
        return False
    if theirs.round != ours.round:
        return theirs.round < ours.round
    if theirs.mark == ours.mark:
        return theirs.count <= ours.count - _MOST_IN_FLIGHT
    return datetime.now(UTC).timestamp() - changed_at > _OLD_S
