"""Damaged, foreign and hostile states are refused before they reach the model."""

import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep_services.agent.replicas.store import unindex
from tests.unit.trainer_sdk.checkpoint.restored_states import (
    State,
    check,
    everywhere,
    restore,
    state,
    values,
)
from tests.unit.trainer_sdk.checkpoint.saved_states import Place, flip_bit
from trainer_sdk.checkpoint.manifest import (
    IMAGE,
    INDEX,
    MANIFEST,
    METADATA,
    Manifest,
    ShardFile,
    decode,
    encode,
)
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.stored_image import StoredImage
from trainer_sdk.checkpoint.storage import StorageError
from trainer_sdk.checkpoint.storage.checkpoints import QUARANTINED, CheckpointMark
from trainer_sdk.checkpoint.storage.folder import Folder


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, world_size=2)


LATEST = "step-000000020"


DAMAGE: dict[str, Callable[[Place], object]] = {
    "a shard with one bit flipped": lambda p: flip_bit(p.root / LATEST / "__0_0.distcp", 4001),
    "metadata with one bit flipped": lambda p: flip_bit(p.root / LATEST / METADATA, 999),
    "a shard cut short": lambda p: _cut(p.root / LATEST / "__0_0.distcp"),
    "a shard that is gone": lambda p: (p.root / LATEST / "__0_0.distcp").unlink(),
    "a manifest cut short": lambda p: _cut(p.root / LATEST / MANIFEST),
    "no manifest": lambda p: (p.root / LATEST / MANIFEST).unlink(),
    "another job": lambda p: p.publish(20, state(20), job="other"),
    "another step's folder": lambda p: (p.root / LATEST).rename(p.root / "step-000000021"),
    "quarantined": lambda p: (p.root / LATEST / QUARANTINED).write_text('{"reason":"nan"}'),
}  # fmt: skip


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_published_checkpoint_is_rejected_for_an_older_one(
    place: Place, damage: Callable[[Place], object]
) -> None:
    """Each kind of damage is rejected, and recorded (A8.8)."""
    place.publish(10, state(10))
    place.publish(20, state(20))
    damage(place)
    found = check(place, 10, ["global", "global"])
    assert {one.step for one in found[0].passed} <= {20, 21}
    event, body = place.told.events[-1]
    assert event == "restored"
    [rejected] = body["rejected"]
    assert "/step-0000000" in body["reason"]
    assert sum(rejected.reason in line for line in place.told.warned) == 1


def test_an_image_whose_index_cannot_be_read_is_named(place: Place) -> None:
    place.publish(10, state(10))
    everywhere(place, 20)
    index = place.images(1) / "own/rank-1/buffer-20" / INDEX
    index.write_bytes(index.read_bytes()[:-100])
    check(place, 10, ["global", "global"])
    [line] = place.told.warned
    assert line.startswith(f"step 10 is restored, and nothing newer: {index} is not what was")


CORRUPT = [name for name in DAMAGE if "shard" in name or "bit" in name or "cut" in name]


@pytest.mark.parametrize("what", CORRUPT)
def test_a_damaged_checkpoint_is_quarantined_and_not_read_again(place: Place, what: str) -> None:
    """The quarantine is recorded with its reason (A8.8)."""
    place.publish(10, state(10))
    path = place.publish(20, state(20))
    DAMAGE[what](place)
    found = check(place, 10, ["global", "global"])
    [told] = [body for event, body in place.told.events if event == "quarantine"]
    assert (told["step"], told["cause"], told["path"]) == (20, "corrupt", str(path))
    (passed,) = found[0].passed
    assert (passed.is_corrupt, passed.path) == (True, str(path))
    mark = msgspec.json.decode((path / QUARANTINED).read_bytes(), type=CheckpointMark)
    assert (mark.cause, mark.reason, mark.by) == ("corrupt", told["reason"], told["by"])
    manifest = (path / MANIFEST).read_bytes()
    assert mark.manifest_hash == xxhash.xxh3_128_hexdigest(manifest)

    again = check(place, 10, ["global", "global"])
    assert "is quarantined" in again[0].passed[0].reason
    (path / MANIFEST).write_bytes(manifest + b" ")
    assert "is quarantined" not in check(place, 10, ["global"] * 2)[0].passed[0].reason


@pytest.mark.parametrize("what", sorted(DAMAGE.keys() - set(CORRUPT) - {"quarantined"}))
def test_a_checkpoint_of_another_job_is_not_quarantined(place: Place, what: str) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    DAMAGE[what](place)
    found = check(place, 10, ["global", "global"])
    assert not any(one.is_corrupt for one in found[0].passed)
    assert not list(place.root.glob(f"*/{QUARANTINED}"))


def test_a_checkpoint_that_cannot_be_read_once_is_not_quarantined(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    with monkeypatch.context() as storm:
        read = Folder.read

        def failing(folder: Folder, name: str, *where: Any) -> bytes:
            if name == f"{LATEST}/__0_0.distcp":
                raise StorageError(f"{name} cannot be read: Input/output error")
            return read(folder, name, *where)

        storm.setattr(Folder, "read", failing)
        check(place, 10, ["global", "global"])
    check(place, 20, ["global", "global"])


@pytest.mark.parametrize("read", ["__0_0.distcp", METADATA])
def test_a_checkpoint_that_retention_removes_is_not_called_corrupt(
    place: Place, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    place.publish(10, state(10))
    path = place.publish(20, state(20))
    real = Folder.read

    def goes(folder: Folder, name: str, *where: Any) -> bytes:
        octets = real(folder, name, *where)
        if name != f"{LATEST}/{read}":
            return octets
        with suppress(FileNotFoundError):  # each rank comes here
            path.rename(path.with_name(".going"))  # in one move, as retention does it
        return octets[:-1]

    monkeypatch.setattr(Folder, "read", goes)
    found = check(place, 10, ["global", "global"])
    assert not any(one.is_corrupt for one in found[0].passed)
    assert not [event for event, _ in place.told.events if event == "quarantine"]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_if_all_states_are_damaged_the_restore_fails(
    place: Place, damage: Callable[[Place], object]
) -> None:
    """Only `--allow-fresh-start` begins from scratch (A8.7)."""
    place.publish(20, state(20))
    damage(place)
    with pytest.raises(RestoreError, match=r"no checkpoint in .* --allow-fresh-start"):
        restore(place)
    assert place.told.events[-1][0] == "restore_failed"
    restored, states = restore(place, fresh=True)
    assert restored == [None, None]
    assert [values(one) for one in states] == [{-1}] * 2
    assert place.told.events[-1][1]["cause"] == "allowed"


@pytest.mark.parametrize("name", [MANIFEST, METADATA, QUARANTINED, "__0_0.distcp", IMAGE, INDEX])
def test_a_fifo_in_place_of_a_file_is_refused_and_not_waited_for(place: Place, name: str) -> None:
    place.publish(10, state(10))
    if name in (IMAGE, INDEX):
        everywhere(place, 20)
        folder = place.images(1) / "own/rank-1/buffer-20"
    else:
        folder = place.publish(20, state(20))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    found = check(place, 10, ["global", "global"])
    assert {one.step for one in found[0].passed if one.step} == {20}


IMAGE_DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "another job": ({"job": "other"}, "is of job other, and this is job vit-l"),
    "another world size": ({"world_size": 4}, "a world of size 4, and this is a world of size 2"),
    "another owner": ({"owner": 0}, "is of rank 0, and this is rank 1"),
    "a later round": ({"round": 7}, "is of round 7, and this is round 2"),
    "another layout": ({"layout": "other"}, "with other tensors"),
}


@pytest.mark.parametrize(("changes", "reason"), IMAGE_DAMAGE.values(), ids=IMAGE_DAMAGE.keys())
def test_an_image_of_another_identity_never_reaches_the_model(
    place: Place, changes: dict[str, Any], reason: str
) -> None:
    """Another job, world size, owner, round or layout is refused (A9.2)."""
    place.publish(10, state(10))
    place.keep(20, 0, state(20))
    place.keep(20, 1, state(666), **changes)
    found = check(place, 10, ["global", "global"])
    assert reason in " ".join(one.reason for one in found[0].passed)


def test_a_torn_image_or_index_is_rejected(place: Place) -> None:
    """An image that was cut off is not loaded (A9.2)."""
    place.publish(10, state(10))
    everywhere(place, 20)
    folder = place.images(1) / "own/rank-1/buffer-20"
    _cut(folder / IMAGE)
    check(place, 10, ["global", "global"])
    everywhere(place, 20)
    _cut(folder / INDEX)
    check(place, 10, ["global", "global"])


@pytest.mark.parametrize(
    ("after", "what"), [("verify", "passed over"), ("fit", "an error on all ranks")]
)
def test_an_image_that_is_overwritten_after_its_verification_is_not_loaded(
    place: Place, monkeypatch: pytest.MonkeyPatch, after: str, what: str
) -> None:
    """An agent overwrites an image by a newer one, maybe long after the verification."""
    everywhere(place, 10)
    for rank in range(2):
        place.keep(20, rank, state(20), held=True)
    plain = getattr(StoredImage, after)

    def and_then(self: StoredImage, *arguments: Any) -> None:
        plain(self, *arguments)
        if self._identity.step == 20 and "rank-1" in self._folder.parts:
            unindex(self._folder)
            with (self._folder / IMAGE).open("r+b") as file:  # in place, as it is mapped
                file.write(bytes(8))  # of a tensor

    monkeypatch.setattr(StoredImage, after, and_then)
    if what == "passed over":
        check(place, 10, ["memory", "memory"])
    else:
        with pytest.raises(RestoreError, match="step 20 broke off, on 1 of 2 ranks: rank 1"):
            restore(place)


def test_a_flipped_bit_in_memory_leads_to_the_copy_of_a_peer(place: Place) -> None:
    """One flipped bit of an image in memory (A8.8)."""
    everywhere(place, 20)
    place.keep(20, 1, state(20), held=True)
    flip_bit(place.images(1) / "own/rank-1/buffer-20" / IMAGE, 12_345)
    found = check(place, 20, ["memory", "peer"])
    assert [(one.tier, one.rank) for one in found[0].passed] == [("memory", 1)]
    assert "differs from what was saved" in found[0].passed[0].reason


def restores_step_10_in_spite_of(place: Place, path: Path, where: float) -> None:
    """Flips a bit of a file at an offset within the block."""
    octets = path.read_bytes()
    flip_bit(path, int(where * 8 * len(octets)))
    try:
        restored, states = restore(place)
        assert {one.step for one in restored if one is not None} == {10}
        assert [values(one) for one in states] == [{10}] * 2
    finally:
        path.write_bytes(octets)
        (place.root / LATEST / QUARANTINED).unlink(missing_ok=True)


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(where=st.floats(0, 1, exclude_max=True), data=st.data())
def test_one_bit_flipped_anywhere_is_found(place: Place, where: float, data: st.DataObject) -> None:
    """Any bit of any image or index (A8.8)."""
    if not place.root.exists():
        place.publish(10, state(10))
        everywhere(place, 20)
    files = sorted(
        one
        for folder in (place.images(0), place.images(1))
        for one in folder.rglob("*")
        if one.is_file()
    )
    path = data.draw(st.sampled_from(files))
    restores_step_10_in_spite_of(place, path, where)


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(where=st.floats(0, 1, exclude_max=True), data=st.data())
def test_one_bit_flipped_anywhere_in_the_files_is_found(
    place: Place, where: float, data: st.DataObject
) -> None:
    """Any bit of any file of a checkpoint (A8.8)."""
    if not place.root.exists():
        place.publish(10, state(10))
        place.publish(20, state(20))
    path = data.draw(st.sampled_from(sorted((place.root / LATEST).iterdir())))
    restores_step_10_in_spite_of(place, path, where)


@pytest.mark.parametrize("tier", ["memory", "global"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.pop("scale"), "it has, and the state to load into lacks, scale"),
        (lambda s: s.update(more=torch.zeros(1)), "it lacks more"),
        (
            lambda s: s.update(scale=torch.zeros(2, 3)),
            "scale is bfloat16[2, 3] there, and float32[2, 3] here",
        ),
        (
            lambda s: s.update(scale=torch.zeros(3, 2).bfloat16()),
            "scale is bfloat16[2, 3] there, and bfloat16[3, 2] here",
        ),
    ],
)
def test_a_state_of_another_form_is_refused_and_unchanged(
    place: Place, tier: str, change: Callable[[State], object], reason: str
) -> None:
    if tier == "global":
        place.publish(10, state(10))
    else:
        everywhere(place, 10)
    states = {rank: state(-1) for rank in range(2)}
    for one in states.values():
        change(one)
    with pytest.raises(RestoreError) as failed:
        place.restore(states)
    assert (reason if tier == "global" else "with other tensors") in str(failed.value)
    assert states[0]["model"][0].weight[0, 0].item() == -1
    assert states[0]["step"] == -1


class Harmful:
    """A class of the training: to read it would run its code."""

    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (Harmful._run, ())

    @staticmethod
    def _run() -> str:
        Harmful.ran = True
        return "run"


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_no_code_of_a_checkpoint_runs(place: Place, tier: str) -> None:
    """A hostile object in a saved value (A13.3)."""
    saved = state(10) | {"step": Harmful()}
    if tier == "global":
        place.publish(10, saved)
    else:
        for rank in range(2):
            place.keep(10, rank, saved)
    with pytest.raises(RestoreError, match="step cannot be read: .*objects of other classes"):
        restore(place)
    assert not Harmful.ran


def test_no_code_in_torchs_metadata_runs(place: Place) -> None:
    """A hostile pickle in the place of torch's metadata (A13.3)."""
    path = place.publish(10, state(10))
    octets = pickle.dumps(Harmful())
    (path / METADATA).write_bytes(octets)
    manifest = decode((path / MANIFEST).read_bytes(), Manifest, "")
    hashed = ShardFile(
        name=METADATA, size_bytes=len(octets), hash=xxhash.xxh3_128_hexdigest(octets)
    )
    files = tuple(hashed if one.name == METADATA else one for one in manifest.files)
    (path / MANIFEST).write_bytes(encode(replace(manifest, files=files)))
    with pytest.raises(RestoreError, match="which describes no tensor"):
        restore(place)
    assert not Harmful.ran
