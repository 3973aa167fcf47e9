"""The name of a step that is taken: whose it is, and whether it makes room for another save.

What is visible is never replaced, unless it is quarantined: then it is put aside, and kept for
people. Whoever reads meanwhile sees the one or the other.
"""

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_128_hexdigest

from trainer_sdk.checkpoint.manifest import MANIFEST, METADATA, Manifest, step_name
from trainer_sdk.checkpoint.storage.checkpoints import (
    PINNED,
    QUARANTINED,
    Shelved,
    mark,
    unmark,
)
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.names import REPLACED, replaced_name, saving_of
from trainer_sdk.checkpoint.storage.port import Storage
from trainer_sdk.checkpoint.writer.files import Place
from trainer_sdk.checkpoint.writer.protocol import WriteState


class TakenError(Exception):
    """Another checkpoint has the name, and stays."""


def why_given_up(there: Shelved, order: WriteState, ours: Manifest) -> str:
    """Why this save need not be there, too; empty if something would be lost with it."""
    found = there.manifest
    if found is None or found.identity.job != order.identity.job:
        return ""
    identity, step = found.identity, order.identity.step
    if identity.round > order.identity.round:
        return (
            f"round {identity.round} has saved step {step} there, whole, and what is visible is "
            "never replaced"
        )
    if there.quarantined is not None:
        return ""
    before = f"round {identity.round} has saved step {step} there, whole"
    if _content(found) == _content(ours):
        return f"{before}, and it is the same"
    if _is_of_one_trainer(found, order):
        return (
            f"{before}, as this training did, and what is visible is never replaced: what has "
            "changed since is not in it"
        )
    return ""


def taken(there: Shelved | None, order: WriteState, place: Place) -> TakenError:
    """Nobody may have the name, and why, and what to do."""
    where = f"{place.storage.url}/{place.step}"
    if there is None:
        return TakenError(
            f"{where} has no {MANIFEST}, so nobody can restore it, and it is not ours to replace: "
            "remove it, or save elsewhere"
        )
    whose = there.flaw or "is another save of this step"
    if there.manifest is not None:
        identity = there.manifest.identity
        whose = f"is what round {identity.round} has saved"
        if identity.job != order.identity.job:
            whose = f"is of job {identity.job}"
    return TakenError(
        f"{where} {whose}, and what is visible is never replaced: to let go of it, "
        f"say everstep ckpt quarantine {place.storage.url} {order.identity.step}; or save elsewhere"
    )


def makes_room(there: Shelved, order: WriteState, place: Place, octets: bytes) -> bool:
    """Have this manifest in the place of what is quarantined; False if that has changed."""
    if isinstance(place.storage, Folder):
        return _exchanged(place.storage, there, order, place)
    return _replaced(place.storage, there, octets)


def _exchanged(storage: Folder, there: Shelved, order: WriteState, place: Place) -> bool:
    storage.exchange(place.before, place.step)
    if xxh3_128_hexdigest(storage.read(f"{place.before}/{MANIFEST}")) != there.manifest_hash:
        storage.exchange(place.before, place.step)  # another save was quicker
        return False
    storage.put_aside(place.before, f"{REPLACED}/{replaced_name(place.step, order.saving)}")
    return True


def _replaced(storage: Storage, there: Shelved, octets: bytes) -> bool:
    """Its mark says first which manifest it means, so that the new one never has it."""
    from trainer_sdk.checkpoint.storage.objects import Objects

    assert isinstance(storage, Objects)
    assert there.quarantined is not None
    folder = step_name(there.step)
    before = storage.read(f"{folder}/{MANIFEST}")
    if xxh3_128_hexdigest(before) != there.manifest_hash:
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


def _folder_of(found: Manifest | None) -> str:
    """Where its files are, below its step."""
    inside = "" if found is None else found.files[0].name.rpartition("/")[0]
    return inside if saving_of(inside) is not None else ""


def _is_of_one_trainer(found: Manifest, order: WriteState) -> bool:
    """The training that saves now has saved it, in the same form."""
    theirs, own = saving_of(found.saving), saving_of(order.saving)
    if theirs is None or own is None or theirs.mark != own.mark:
        return False
    return found.identity == order.identity


def _content(found: Manifest) -> tuple[object, ...]:
    """The same for two saves whose states are, byte for byte."""
    names = ((one.name.rpartition("/")[2], one.size_bytes, one.hash) for one in found.files)
    shards = sorted(one for one in names if one[0] != METADATA)
    identity = found.identity
    return identity.job, identity.world_size, identity.layout, shards
