"""A save whose step has a checkpoint already: what makes room, what stays, and who hears of it."""

import tempfile
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from xxhash import xxh3_128_hexdigest

from tests.checkpoint_helpers.saved_by import JOB, Saving, saving
from tests.contract.s3_server import BUCKET, s3_server
from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint import Checkpointer, SaveError
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.manifest import MANIFEST, Manifest, RankPart, encode, step_name
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.discovery import see_published
from trainer_sdk.checkpoint.storage import Storage, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import (
    PINNED,
    QUARANTINED,
    CheckpointMark,
    look,
    mark,
    quarantine,
    verify,
)
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.leftovers import leftovers
from trainer_sdk.checkpoint.storage.names import REPLACED, SAVING
from trainer_sdk.checkpoint.writer import publication
from trainer_sdk.checkpoint.writer.files import part_name, place_of
from trainer_sdk.checkpoint.writer.protocol import WriteState
from trainer_sdk.checkpoint.writer.publication import settle

FIRST, SECOND = {"a": torch.zeros(300)}, {"a": torch.ones(300)}
NAN = CheckpointMark(by="rank 0", reason="the loss was NaN", cause="nan_after_load")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


@pytest.fixture(params=["folder", "s3"])
def root(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(folder / "root")
    for name, value in request.getfixturevalue("server").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def context_of(folder: Path, round_: int) -> JobContext:
    return JobContext(JOB, round_, str(folder / f"round-{round_}"), has_keeper=True)


def ranks_save(
    folder: Path, root: str, round_: int, state: dict[str, Any], **how: Any
) -> list[Saving]:
    """Both ranks of a round save step 5 of the job."""

    def one(group: RankGroup) -> Saving:
        with saving(folder, group, root=root, context=context_of(folder, round_), **how) as rank:
            own = state | {f"own{group.rank}": torch.full((9,), float(round_))}
            rank.save(5, own, finalize=(lambda: rank.told.events.append(("finalized", {})),))
            rank.finish()
            return rank

    return together(2, one)


def there_now(storage: Storage) -> tuple[int, bool]:
    """The round of step 5, and whether nobody may load it."""
    there = look(storage, 5)
    assert there is not None
    assert there.manifest is not None
    return there.manifest.identity.round, there.quarantined is not None


def names(rank: Saving) -> list[str]:
    return [event for event, _ in rank.told.events]


def test_what_is_quarantined_makes_room_and_is_kept_for_people(root: str, folder: Path) -> None:
    ranks_save(folder, root, 1, FIRST)
    storage = storage_for(root)
    before = look(storage, 5)
    assert before is not None
    assert quarantine(storage, before, NAN)
    assert not quarantine(storage, look(storage, 5) or before, NAN)
    mark(storage, 5, PINNED, CheckpointMark(by="ann", reason="evidence"))

    ranks = ranks_save(folder, root, 2, SECOND)
    assert [names(one).count("finalized") for one in ranks] == [1, 1]
    assert "committed" in names(ranks[0])
    assert not any(one.told.warned for one in ranks)
    there = look(storage, 5)
    assert there is not None
    assert there_now(storage) == (2, False)
    assert there.pinned is None
    assert storage.size(f"{step_name(5)}/{QUARANTINED}") is None
    assert verify(storage, there).is_good
    (aside,) = [
        one.name.removesuffix(f"/{QUARANTINED}")
        for where in (REPLACED, step_name(5))
        for one in storage.files(where)
        if one.name.endswith(QUARANTINED)
    ]
    assert storage.size(f"{aside}/{PINNED}") is not None
    assert "__1_0.distcp" in "".join(one.name for one in storage.files(aside))


def test_what_has_made_room_goes_after_a_week(
    root: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_save(folder, root, 1, FIRST)
    storage = storage_for(root)
    before = look(storage, 5)
    assert before is not None
    quarantine(storage, before, NAN)
    ranks_save(folder, root, 2, SECOND)
    real = storage.now()
    monkeypatch.setattr(type(storage), "now", lambda _: real + timedelta(days=6))
    assert leftovers(storage) == []
    monkeypatch.setattr(type(storage), "now", lambda _: real + timedelta(days=8))
    (left,) = leftovers(storage)
    assert "it was quarantined, and another save has its place" in left.reason
    storage.remove(left.folder)
    there = look(storage, 5)
    assert there is not None
    assert verify(storage, there).is_good


@pytest.mark.parametrize("on_error", ["warn", "retry", "fatal"])
def test_what_is_whole_and_stays_fails_the_save_of_every_rank(
    root: str, folder: Path, on_error: Any
) -> None:
    ranks_save(folder, root, 1, FIRST)

    def one(group: RankGroup) -> tuple[Saving, str]:
        about, said = context_of(folder, 2), ""
        with saving(folder, group, root=root, context=about, on_error=on_error) as rank:
            rank.save(5, SECOND, finalize=(lambda: rank.told.events.append(("finalized", {})),))
            try:
                rank.finish()
            except SaveError as error:
                said = str(error)
            assert rank.queue.last_good is None
            return rank, said

    ranks = together(2, one)
    for rank, said in ranks:
        words = said if on_error == "fatal" else rank.told.warned[0]
        assert "is what round 1 has saved" in words
        assert f"everstep ckpt quarantine {root} 5" in words
        assert not {"finalized", "committed"} & set(names(rank))
    (failed,) = ranks[0][0].events("failed")
    assert (failed["error"], failed["attempt"]) == ("taken", 1)
    storage = storage_for(root)
    assert there_now(storage) == (1, False)
    left = [one.name for where in (SAVING, step_name(5)) for one in storage.files(where)]
    assert not [name for name in left if "5-r2-" in name and "failed-" not in name]


def test_a_round_that_was_fenced_off_gives_up_on_every_rank(root: str, folder: Path) -> None:
    ranks_save(folder, root, 2, SECOND)
    storage = storage_for(root)
    for is_bad in (False, True):
        ranks = ranks_save(folder, root, 1, FIRST, on_error="fatal")
        why = "earlier round 1, which replaces nothing" if is_bad else "is never replaced"
        assert why in ranks[0].told.warned[0]
        assert all("round 2 has saved" in one.told.warned[0] for one in ranks)
        assert there_now(storage) == (2, is_bad)
        assert not storage.files(SAVING)
        assert not [one.name for one in storage.files(step_name(5)) if "5-r1-" in one.name]
        there = look(storage, 5)
        assert there is not None
        quarantine(storage, there, NAN)


def test_the_same_content_need_not_be_saved_again(root: str, folder: Path) -> None:
    warned = []
    for round_ in (1, 2):
        about = context_of(folder, round_)
        with saving(folder, root=root, context=about, on_error="fatal") as rank:
            rank.save(5, FIRST)
            assert rank.finish() == [1]
            warned += rank.told.warned
    (said,) = warned
    assert "with the same content" in said
    assert there_now(storage_for(root)) == (1, False)


def test_a_training_may_save_a_step_twice(root: str, folder: Path) -> None:
    with saving(folder, root=root, on_error="fatal") as rank:
        rank.save(5, FIRST)
        rank.save(5, SECOND, wait=True)
        assert rank.finish() == [1, 2]
    (said,) = rank.told.warned
    assert "round 1 has saved step 5 there" in said
    assert "later changes are not in it" in said
    assert "the same" not in said, "its values differ"


class Watched:
    """Looks at the step after each change of the storage, as a restore would."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int | str]] = []
        for name in ("put", "put_if_absent", "replace", "delete", "exchange", "put_aside"):
            if hasattr(storage, name):
                real = getattr(type(storage), name)
                monkeypatch.setattr(type(storage), name, self._looking(name, real))

    def _looking(self, after: str, real: Any) -> Any:
        def changed(storage: Storage, *arguments: Any) -> Any:
            found = real(storage, *arguments)
            sight = see_published(storage, JOB, [step_name(5)])
            self.seen += [(after, one.identity.round) for one in sight.offers]
            self.seen += [(after, one.reason) for one in sight.passed]
            return found

        return changed


def test_whoever_looks_meanwhile_sees_the_one_quarantined_or_the_other_good(
    root: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_save(folder, root, 1, FIRST)
    storage = storage_for(root)
    mark(storage, 5, QUARANTINED, NAN)  # by an older release: of whatever is there
    there = look(storage, 5)
    assert there is not None
    assert there.manifest is not None
    place = place_of(root, "5-r2-0a-1", 5)
    octets = _moved(storage, there.manifest, place.before, place.inside)
    watched = Watched(storage, monkeypatch)
    assert publication.replace_quarantined(there, _order(root, there.manifest), place, octets)
    ops = [after for after, _ in watched.seen]
    moved = ops.index("exchange" if isinstance(storage, Folder) else "replace")
    assert all("is quarantined: the loss was NaN" in str(it) for _, it in watched.seen[:moved])
    assert {it for _, it in watched.seen[moved:]} == {2}, "from the very move on"


def test_who_comes_second_to_a_quarantined_step_leaves_what_is_there_now(
    root: str, folder: Path
) -> None:
    ranks_save(folder, root, 1, FIRST)
    storage = storage_for(root)
    seen = look(storage, 5)
    assert seen is not None
    quarantine(storage, seen, NAN)
    quarantined = look(storage, 5)
    assert quarantined is not None
    ranks_save(folder, root, 2, SECOND)
    assert quarantined.manifest is not None
    place = place_of(root, "5-r3-0a-1", 5)
    octets = _moved(storage, quarantined.manifest, place.before, place.inside)
    assert not publication.replace_quarantined(
        quarantined, _order(root, quarantined.manifest), place, octets
    )
    assert there_now(storage) == (2, False)


def test_a_rank_that_looks_while_room_is_made_does_not_think_that_it_was_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(folder / "root")
    ranks_save(folder, root, 1, FIRST)
    storage = storage_for(root)
    before = look(storage, 5)
    assert before is not None
    quarantine(storage, before, NAN)
    there = look(storage, 5)
    assert there is not None
    assert there.manifest is not None
    place, order = place_of(root, "5-r2-0a-1", 5), _order(root, there.manifest, rank=1)
    octets = _moved(storage, there.manifest, place.before, place.inside)
    identity = replace(there.manifest.identity, round=2)
    part = RankPart(identity=identity, rank=1, files=(), stall_s=0.0, write_s=0.0)
    storage.put(f"{place.before}/{part_name(1)}", (encode(part),))
    real = Folder.read

    def read(one: Folder, name: str) -> bytes:
        found = real(one, name)
        if name == f"{step_name(5)}/{MANIFEST}":  # what it sees is of before the very move
            monkeypatch.setattr(Folder, "read", real)
            assert there is not None
            assert publication.replace_quarantined(there, order, place, octets)
        return found

    monkeypatch.setattr(Folder, "read", read)
    done = settle(order, b"", lambda _: None)
    assert there_now(storage) == (2, False)
    assert (done.given_up, done.manifest_hash) == ("", xxh3_128_hexdigest(octets))


def _order(root: str, found: Manifest, rank: int = 0) -> WriteState:
    return WriteState(
        save=1,
        image="",
        identity=found.identity,
        rank=rank,
        file_bytes=0,
        image_bytes=0,
        metadata=(0, 0),
        entries=(0, 0),
        root=root,
        saving="5-r2-0a-1",
        within_s=1.0,
    )


def _moved(storage: Storage, found: Manifest, before: str, inside: str) -> bytes:
    """The same checkpoint as round 2 would save it, before it can be seen."""
    files = []
    for one in found.files:
        name = one.name.rpartition("/")[2]
        storage.put(f"{before}/{name}", [storage.read(f"{step_name(5)}/{one.name}")])
        files.append(replace(one, name=f"{inside}{name}"))
    identity = replace(found.identity, round=2)
    octets = encode(replace(found, identity=identity, files=tuple(files), saving="5-r2-0a-1"))
    if isinstance(storage, Folder):
        storage.put(f"{before}/{MANIFEST}", [octets])
    return octets


def test_a_file_system_without_an_exchange_takes_two_moves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_sdk.checkpoint.storage.folder._exchanged", lambda *_: False)
    storage = Folder(str(folder))
    for name in ("one", "other"):
        storage.put(f"{name}/it", [name.encode()])
    storage.exchange("one", "other")
    assert (storage.read("one/it"), storage.read("other/it")) == (b"other", b"one")
    assert storage.folders() == ["one", "other"]


def begun(root: str) -> Checkpointer:
    """What a training saves with that must not lose a save."""
    return Checkpointer(root, job=JOB, every=1000, on_error="fatal")


def save_4_and_5(root: str) -> None:
    with begun(root) as saves:
        for step in (4, 5):
            saves.save(step, {"a": torch.full((50,), float(step))}, wait=True)


def test_a_training_that_comes_to_a_corrupt_step_again_replaces_it(
    root: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the restore, trained again, saved again, restored: with `fatal` all the way."""
    save_4_and_5(root)
    storage = storage_for(root)
    there = look(storage, 5)
    assert there is not None
    assert there.manifest is not None
    name = f"{step_name(5)}/{there.manifest.files[0].name}"
    storage.put(name, [storage.read(name)[:-1] + b"?"])

    state = {"a": torch.zeros(50)}
    with begun(root) as saves:
        found = saves.restore(state)
        assert found is not None
        assert found.step == 4
        saves.save(5, {"a": torch.full((50,), 5.5)})
    with begun(root) as saves:
        found = saves.restore(state)
        assert found is not None
        assert found.step == 5
    assert state["a"].tolist() == [5.5] * 50


def test_with_fatal_a_training_does_not_end_well_on_a_step_it_has_not_saved(
    root: str, folder: Path
) -> None:
    """It went on from an older step, and comes to one that is there, whole, from before."""
    save_4_and_5(root)
    saves = begun(root)
    saves.restore({"a": torch.zeros(50)}, step=4)
    saves.save(5, {"a": torch.full((50,), 5.5)})
    with pytest.raises(SaveError, match="a visible checkpoint is never replaced"):
        saves.close()
