"""What ranks load, by real files and process groups: the newest that all can have, verified."""

import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.saved_states import Place, flip_bit
from trainer_sdk.checkpoint.manifest import (
    IMAGE,
    INDEX,
    MANIFEST,
    METADATA,
    ImageIndex,
    Manifest,
    ShardFile,
    decode,
    encode,
)
from trainer_sdk.checkpoint.quarantine import MARKED_INDEX, mark_image
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.restoring import Restored
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.shelf import QUARANTINED, Mark

State = dict[str, Any]


def state(value: float) -> State:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(value)
    return {
        "model": model,
        "scale": torch.full((2, 3), value, dtype=torch.bfloat16),
        "step": int(value),
        "nested": {"list": [1, 2, int(value)], "tensors": [torch.full((3,), value)], "none": None},
    }


def values(found: State) -> set[float]:
    """All numbers that tell which state it is."""
    return {
        *(one for tensor in found["model"].parameters() for one in tensor.flatten().tolist()),
        *found["scale"].flatten().tolist(),
        float(found["step"]),
        float(found["nested"]["list"][2]),
        *found["nested"]["tensors"][0].tolist(),
    }


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, world_size=2)


def restore(
    place: Place, step: int | None = None, **how: Any
) -> tuple[list[Restored | None], list[State]]:
    states = {rank: state(-1) for rank in range(place.world_size)}
    found = place.restore(states, step, **how)
    return found, list(states.values())


def everywhere(place: Place, step: int, **changes: Any) -> None:
    for rank in range(place.world_size):
        place.keep(step, rank, state(step), **changes)


def check(place: Place, step: int, tiers: list[str], **how: Any) -> list[Restored]:
    """All ranks restore this step from these tiers, and have it whole."""
    restored, states = restore(place, **how)
    assert all(one is not None for one in restored)
    found = [one for one in restored if one is not None]
    assert [(one.step, one.tier) for one in found] == [(step, tier) for tier in tiers]
    assert [values(one) for one in states] == [{step}] * place.world_size
    return found


def test_memory_is_taken_when_it_has_the_newest(place: Place) -> None:
    place.publish(10, state(10))
    everywhere(place, 20)
    check(place, 20, ["memory", "memory"])
    [(event, body)] = place.told.events
    assert event == "restored"
    assert (body["step"], body["reason"], body["rejected"]) == (20, "the newest", [])
    assert [(one["tier"], one["ranks"]) for one in body["tiers"]] == [("memory", 2)]


def test_files_are_taken_when_they_are_newer(place: Place) -> None:
    path = place.publish(30, state(30))
    everywhere(place, 20)
    check(place, 30, ["global", "global"])
    assert place.told.events[0][1]["path"] == str(path)


def test_tiers_are_mixed_for_one_state(place: Place) -> None:
    place.keep(20, 0, state(20))
    place.keep(20, 1, state(20), held=True)
    check(place, 20, ["memory", "peer"])


def test_a_rank_that_lost_its_node_reads_files_while_the_other_one_has_memory(place: Place) -> None:
    place.publish(20, state(20))
    place.keep(20, 0, state(20))
    check(place, 20, ["memory", "global"])


def test_nothing_anywhere_is_a_fresh_start_and_is_said(place: Place) -> None:
    restored, states = restore(place)
    assert restored == [None, None]
    assert [values(one) for one in states] == [{-1}] * 2
    [(event, body)] = place.told.events
    assert (event, body["cause"]) == ("fresh", "no_checkpoints")
    assert "there has never been a checkpoint" in place.told.warned[0]


def test_an_explicit_step_that_is_missing_is_an_error_that_names_those_there_are(
    place: Place,
) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    with pytest.raises(RestoreError, match=r"step 15 cannot be restored .* there are 20, 10"):
        restore(place, 15, fresh=True)
    assert place.told.events[0][0] == "restore_failed"
    assert place.told.events[0][1]["wanted_step"] == 15


def test_an_explicit_step_is_restored_though_there_are_newer_ones(place: Place) -> None:
    for step in (10, 20, 30):
        place.publish(step, state(step))
    everywhere(place, 40)
    restored, states = restore(place, 20)
    assert {one.step for one in restored if one is not None} == {20}
    assert [values(one) for one in states] == [{20}] * 2


LATEST = "step-000000020"
DAMAGE = {
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
def test_a_damaged_checkpoint_of_files_is_passed_over_for_an_older_one(
    place: Place, damage: Callable[[Place], object]
) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    damage(place)
    found = check(place, 10, ["global", "global"])
    assert {one.step for one in found[0].passed} <= {20, 21}
    [(_, body)] = place.told.events
    assert len(body["rejected"]) == 1
    assert "/step-0000000" in body["reason"]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_when_all_are_damaged_the_training_stops_rather_than_start_anew(
    place: Place, damage: Callable[[Place], object]
) -> None:
    place.publish(20, state(20))
    damage(place)
    with pytest.raises(RestoreError, match=r"no checkpoint in .* allow_fresh_start=True"):
        restore(place)
    assert place.told.events[-1][0] == "restore_failed"
    restored, states = restore(place, fresh=True)
    assert restored == [None, None]
    assert [values(one) for one in states] == [{-1}] * 2
    assert place.told.events[-1][1]["cause"] == "allowed"


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
    place.publish(10, state(10))
    place.keep(20, 0, state(20))
    place.keep(20, 1, state(666), **changes)
    found = check(place, 10, ["global", "global"])
    assert reason in " ".join(one.reason for one in found[0].passed)


def test_a_torn_image_or_index_is_passed_over(place: Place) -> None:
    place.publish(10, state(10))
    everywhere(place, 20)
    folder = place.images(1) / "own/rank-1/buffer-20"
    _cut(folder / IMAGE)
    check(place, 10, ["global", "global"])
    everywhere(place, 20)
    _cut(folder / INDEX)
    check(place, 10, ["global", "global"])


def test_an_image_that_is_being_filled_has_no_index_and_is_not_seen(place: Place) -> None:
    everywhere(place, 10)
    everywhere(place, 20)
    (place.images(0) / "own/rank-0/buffer-20" / INDEX).unlink()
    check(place, 10, ["memory", "memory"])


def test_a_flipped_bit_in_memory_leads_to_the_copy_that_a_peer_has_held(place: Place) -> None:
    everywhere(place, 20)
    place.keep(20, 1, state(20), held=True)
    flip_bit(place.images(1) / "own/rank-1/buffer-20" / IMAGE, 12_345)
    found = check(place, 20, ["memory", "peer"])
    assert [(one.tier, one.rank) for one in found[0].passed] == [("memory", 1)]
    assert "is not what was saved" in found[0].passed[0].reason


@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(where=st.floats(0, 1, exclude_max=True), data=st.data())
def test_one_bit_flipped_anywhere_is_found(place: Place, where: float, data: st.DataObject) -> None:
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
    octets = path.read_bytes()
    flip_bit(path, int(where * 8 * len(octets)))
    try:
        restored, states = restore(place)
        assert {one.step for one in restored if one is not None} == {10}
        assert [values(one) for one in states] == [{10}] * 2
    finally:
        path.write_bytes(octets)


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(where=st.floats(0, 1, exclude_max=True), data=st.data())
def test_one_bit_flipped_anywhere_in_the_files_is_found(
    place: Place, where: float, data: st.DataObject
) -> None:
    if not place.root.exists():
        place.publish(10, state(10))
        place.publish(20, state(20))
    path = data.draw(st.sampled_from(sorted((place.root / LATEST).iterdir())))
    octets = path.read_bytes()
    flip_bit(path, int(where * 8 * len(octets)))
    try:
        restored, states = restore(place)
        assert {one.step for one in restored if one is not None} == {10}
        assert [values(one) for one in states] == [{10}] * 2
    finally:
        path.write_bytes(octets)


def test_older_steps_are_looked_for_until_one_will_do(place: Place) -> None:
    for step in range(1, 25):
        path = place.publish(step, state(step))
        if step > 2:
            (path / "__0_0.distcp").unlink()
    check(place, 2, ["global", "global"])
    assert len(place.told.events[0][1]["rejected"]) == 22


def test_a_storage_that_cannot_be_listed_is_no_reason_to_start_anew(place: Place) -> None:
    place.root.write_text("a file, where a folder should be")
    with pytest.raises(RestoreError, match="cannot be listed"):
        restore(place)
    everywhere(place, 20)
    check(place, 20, ["memory", "memory"])


def test_a_state_that_cannot_be_read_on_one_rank_stops_all_before_anything_is_loaded(
    place: Place,
) -> None:
    place.publish(10, state(10))
    states = {0: state(-1), 1: state(-1) | {"nested.none": 1}}
    with pytest.raises(RestoreError, match=r"on 1 of 2 ranks: rank 1: .*nested.none: rename one"):
        place.restore(states)
    assert values(states[0]) == {-1}


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
def test_a_state_of_another_form_is_refused_and_left_as_it_is(
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
    """A class of the training's own: reading it would run its code."""

    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (Harmful._run, ())

    @staticmethod
    def _run() -> str:
        Harmful.ran = True
        return "run"


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_no_code_of_a_checkpoint_runs(place: Place, tier: str) -> None:
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


def test_a_quarantined_image_is_seen_by_no_rank_but_its_files_are(place: Place) -> None:
    place.publish(20, state(20))
    everywhere(place, 20)
    folder = place.images(1) / "own/rank-1/buffer-20"
    identity = decode((folder / INDEX).read_bytes(), ImageIndex, "").identity
    mark_image(folder, identity, Mark(reason="nan", failed_at=23))
    assert not (folder / INDEX).exists()
    assert (folder / MARKED_INDEX).exists()
    found = check(place, 20, ["global", "global"])
    assert "is quarantined: nan" in found[0].passed[0].reason


def test_ranks_wait_until_the_agent_has_fetched_what_peers_hold(place: Place) -> None:
    everywhere(place, 10)

    def fetch() -> None:
        everywhere(place, 20, held=True)
        for rank in range(2):
            said = {"round": place.round, "complete": True, "reason": ""}
            (place.images(rank) / "offer.json").write_text(json.dumps(said))

    for rank in range(2):  # the word of an earlier round is not waited for
        (place.images(rank) / "offer.json").write_text('{"round":1,"complete":true}')
    agent = threading.Timer(0.1, fetch)
    agent.start()
    check(place, 20, ["peer", "peer"], agent_within_s=30)
    agent.join()


def test_an_agent_that_says_nothing_is_waited_for_only_so_long(place: Place) -> None:
    everywhere(place, 10)
    check(place, 10, ["memory", "memory"], agent_within_s=0.05)


@pytest.mark.parametrize(
    ("has_root", "is_sure", "is_fresh"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_nodes_that_cannot_be_asked_may_have_all_there_is_where_there_are_no_files(
    place: Place, has_root: bool, is_sure: bool, is_fresh: bool
) -> None:
    for rank in range(2):
        place.images(rank).mkdir(parents=True)
        said = {"round": 2, "complete": False, "reason": "node-07 is away", "is_sure": is_sure}
        (place.images(rank) / "offer.json").write_text(json.dumps(said))
    how: dict[str, Any] = {"agent_within_s": 30}
    if not has_root:
        how["storage"] = None
    if is_fresh:
        assert restore(place, **how)[0] == [None, None]
        assert ("node-07 is away" in place.told.warned[0]) is not is_sure
    else:
        with pytest.raises(RestoreError, match="node-07 is away"):
            restore(place, **how)


def test_object_stores_have_the_files_of_a_save_in_a_folder_of_their_own(place: Place) -> None:
    path = place.publish(10, state(10))
    manifest = decode((path / MANIFEST).read_bytes(), Manifest, "")
    inside = "10-r1-a1b2c3d4-1/"
    store = storage_for(f"memory://restore-{path}")
    for file in manifest.files:
        store.put(f"{path.name}/{inside}{file.name}", [(path / file.name).read_bytes()])
    files = tuple(replace(one, name=inside + one.name) for one in manifest.files)
    store.put(f"{path.name}/{MANIFEST}", [encode(replace(manifest, files=files))])
    check(place, 10, ["global", "global"], storage=store)


@pytest.mark.parametrize(
    ("lost", "partners"), [([3], False), ([0, 2], False), ([5, 6], False), ([4, 5], True)]
)
def test_of_eight_nodes_with_mirrors_any_but_a_pair_of_partners_may_be_lost(
    tmp_path: Path, lost: list[int], partners: bool
) -> None:
    place = Place(tmp_path, world_size=8)
    place.publish(10, state(10))
    for rank in set(range(8)) - set(lost):
        place.keep(20, rank, state(20))
    for rank in lost:
        if rank ^ 1 not in lost:  # the partner has sent what it held
            place.keep(20, rank, state(20), held=True)
    step = 10 if partners else 20
    tiers = ["global"] * 8 if partners else ["peer" if r in lost else "memory" for r in range(8)]
    found = check(place, step, tiers)
    if partners:
        assert "rank 4, 5 have nothing of it" in found[0].passed[0].reason
