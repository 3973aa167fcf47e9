"""Which state ranks load, with real files and process groups: the newest that all can verify."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.trainer_sdk.checkpoint.restored_states import (
    check,
    everywhere,
    restore,
    state,
    values,
)
from tests.unit.trainer_sdk.checkpoint.saved_states import Place
from trainer_sdk.checkpoint.image_folder import MARKED_INDEX, mark_image
from trainer_sdk.checkpoint.manifest import INDEX, MANIFEST, ImageIndex, Manifest, decode, encode
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import OWNER, CheckpointMark


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, world_size=2)


def test_memory_is_chosen_if_it_has_the_newest_state(place: Place) -> None:
    place.publish(10, state(10))
    everywhere(place, 20)
    check(place, 20, ["memory", "memory"])
    [(event, body)] = place.told.events
    assert event == "restored"
    assert (body["step"], body["reason"], body["rejected"]) == (20, "the newest", [])
    assert [(read.tier, read.ranks) for read in body["tiers"]] == [("memory", 2)]


def test_files_are_chosen_if_they_are_newer(place: Place) -> None:
    path = place.publish(30, state(30))
    everywhere(place, 20)
    check(place, 30, ["global", "global"])
    assert place.told.events[0][1]["path"] == str(path)


def test_tiers_are_mixed_for_one_state(place: Place) -> None:
    place.keep(20, 0, state(20))
    place.keep(20, 1, state(20), held=True)
    check(place, 20, ["memory", "peer"])


def test_a_rank_that_lost_its_node_reads_files_while_another_has_memory(place: Place) -> None:
    place.publish(20, state(20))
    place.keep(20, 0, state(20))
    check(place, 20, ["memory", "global"])


def test_without_any_state_a_fresh_start_is_reported(place: Place) -> None:
    restored, states = restore(place)
    assert restored == [None, None]
    assert [values(one) for one in states] == [{-1}] * 2
    [(event, body)] = place.told.events
    assert (event, body["cause"]) == ("fresh", "no_checkpoints")
    assert "there has never been a checkpoint" in place.told.warned[0]


def test_where_all_steps_were_deleted_nobody_says_there_has_never_been_one(place: Place) -> None:
    place.root.mkdir()
    (place.root / OWNER).write_text('{"job":"vit-l"}')
    assert restore(place)[0] == [None, None]
    assert "which job vit-l has used before: its checkpoints were deleted" in place.told.warned[0]
    assert "has never been" not in str((place.told.events, place.told.warned))


def test_an_explicit_step_that_is_missing_is_an_error_that_names_existing_steps(
    place: Place,
) -> None:
    """Even where a fresh start is allowed (A8.7)."""
    place.publish(10, state(10))
    place.publish(20, state(20))
    with pytest.raises(RestoreError, match=r"step 15 cannot be restored .* there are 20, 10"):
        restore(place, 15, fresh=True)
    assert place.told.events[0][0] == "restore_failed"
    assert place.told.events[0][1]["wanted_step"] == 15


def test_an_explicit_step_is_restored_although_newer_steps_exist(place: Place) -> None:
    for step in (10, 20, 30):
        place.publish(step, state(step))
    everywhere(place, 40)
    restored, states = restore(place, 20)
    assert {one.step for one in restored if one is not None} == {20}
    assert [values(one) for one in states] == [{20}] * 2


def test_an_image_that_is_being_written_is_not_offered(place: Place) -> None:
    everywhere(place, 10)
    everywhere(place, 20)
    (place.images(0) / "own/rank-0/buffer-20" / INDEX).unlink()
    check(place, 10, ["memory", "memory"])


def test_older_steps_are_tried_until_one_can_be_loaded(place: Place) -> None:
    for step in range(1, 25):
        path = place.publish(step, state(step))
        if step > 2:
            (path / "__0_0.distcp").unlink()
    check(place, 2, ["global", "global"])
    assert len(place.told.events[-1][1]["rejected"]) == 22


def test_a_storage_that_cannot_be_listed_does_not_allow_a_fresh_start(place: Place) -> None:
    """The restore stops, unless the memory has a state (A8.7, A15.2)."""
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


def test_a_quarantined_image_is_seen_by_no_rank_but_its_files_are(place: Place) -> None:
    place.publish(20, state(20))
    everywhere(place, 20)
    folder = place.images(1) / "own/rank-1/buffer-20"
    identity = decode((folder / INDEX).read_bytes(), ImageIndex, "").identity
    mark_image(folder, identity, CheckpointMark(reason="nan", failed_at=23))
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


def test_the_wait_for_a_silent_agent_has_a_limit(place: Place) -> None:
    everywhere(place, 10)
    check(place, 10, ["memory", "memory"], agent_within_s=0.05)


@pytest.mark.parametrize(
    ("has_root", "is_sure", "is_fresh"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_unreachable_nodes_forbid_a_fresh_start_without_files(
    place: Place, has_root: bool, is_sure: bool, is_fresh: bool
) -> None:
    """An unreachable node does not allow a fresh start (A8.7, A15.2)."""
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
    """A lost pair is restored from files, with the reason (A9.1)."""
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
