"""Checkpoints in a storage: what is there, whether it is what was saved, how they are pulled."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from tests.checkpoint_helpers.checkpoint_shelves import flip, save
from trainer_sdk.checkpoint.manifest import MANIFEST, Manifest, decode, encode, step_name
from trainer_sdk.checkpoint.storage import Storage, StorageError, storage_for
from trainer_sdk.checkpoint.storage.checkpoints import (
    PINNED,
    QUARANTINED,
    CheckpointMark,
    GoneError,
    look,
    mark,
    owner_of,
    pull,
    quarantine,
    stored_checkpoints,
    unmark,
    verify,
)
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.port import MissingError

JOB = "llama"


def test_what_was_saved_is_found_the_newest_first(storage: Storage, place: str) -> None:
    assert owner_of(storage) is None
    for step in (300, 100, 200):
        save(place, JOB, step)
    storage.put("step-000000400/__0_0.distcp", [b"not published"])
    assert owner_of(storage) == JOB
    found = stored_checkpoints(storage)
    assert [one.step for one in found] == [300, 200, 100]
    assert [one.flaw for one in found] == ["", "", ""]
    assert found[0].path == f"{storage.url}/step-000000300"
    assert look(storage, 400) is None


def test_every_byte_is_compared(storage: Storage, place: str) -> None:
    save(place, JOB, 100, size=9000)
    read: list[int] = []
    one = look(storage, 100)
    assert one is not None
    verdict = verify(storage, one, read.append)
    assert (verdict.flaw, verdict.size_bytes) == ("", 18011)
    assert sum(read) == 18011


@pytest.mark.parametrize("at", [0, 4095])
def test_one_bit_flipped_is_found_and_the_file_named(storage: Storage, place: str, at: int) -> None:
    """Folders and object stores alike (A8.8)."""
    save(place, JOB, 100)
    flip(place, 100, at=at)
    one = look(storage, 100)
    assert one is not None
    assert "__1_0.distcp differs from what was saved" in verify(storage, one).flaw


def test_a_file_that_is_missing_or_cut_short_is_named(storage: Storage, place: str) -> None:
    save(place, JOB, 100)
    one = look(storage, 100)
    assert one is not None
    storage.put("step-000000100/__1_0.distcp", [b"short"])
    assert "__1_0.distcp has 5 bytes, and 4096 bytes were saved" in verify(storage, one).flaw
    storage.delete("step-000000100/__1_0.distcp")
    assert "__1_0.distcp is missing" in verify(storage, one).flaw


def test_a_manifest_that_is_torn_or_of_another_step_is_a_flaw(storage: Storage, place: str) -> None:
    save(place, JOB, 100)
    octets = storage.read(f"{step_name(100)}/{MANIFEST}")
    storage.put(f"{step_name(200)}/{MANIFEST}", [octets])
    storage.put(f"{step_name(300)}/{MANIFEST}", [octets[:-7]])
    flaws = {one.step: one.flaw for one in stored_checkpoints(storage)}
    assert flaws[100] == ""
    assert "is of step 100" in flaws[200]
    assert "is not what was written" in flaws[300]


def test_a_manifest_that_names_files_elsewhere_reads_none_of_them(
    storage: Storage, place: str
) -> None:
    """A path that leads out of the place is refused (A13.3)."""
    save(place, JOB, 100)
    name = f"{step_name(100)}/{MANIFEST}"
    manifest = decode(storage.read(name), Manifest, name)
    hostile = msgspec.structs.replace(manifest.files[0], name="../../../../etc/passwd")
    storage.put(name, [encode(msgspec.structs.replace(manifest, files=(hostile,)))])
    one = look(storage, 100)
    assert one is not None
    assert "may lead out" in verify(storage, one).flaw


def test_marks_stand_beside_the_manifest_until_they_are_taken_back(
    storage: Storage, place: str
) -> None:
    save(place, JOB, 100)
    mark(storage, 100, PINNED, CheckpointMark(by="ann", reason="paper"))
    mark(storage, 100, QUARANTINED, CheckpointMark(cause="operator"))
    one = look(storage, 100)
    assert one is not None
    assert one.pinned == CheckpointMark(by="ann", reason="paper")
    assert one.quarantined == CheckpointMark(cause="operator")
    unmark(storage, 100, PINNED)
    storage.put(f"{step_name(100)}/{QUARANTINED}", [b"not json"])
    one = look(storage, 100)
    assert one is not None
    assert one.pinned is None
    assert one.quarantined is not None  # whatever it says, it stands there
    assert verify(storage, one).is_good


def test_a_mark_of_what_has_just_been_removed_is_in_nobodys_way(
    storage: Storage, place: str
) -> None:
    save(place, JOB, 100)
    one = look(storage, 100)
    assert one is not None
    storage.remove(step_name(100))
    quarantine(storage, one, CheckpointMark(cause="operator"))
    with suppress(MissingError):
        mark(
            storage,
            100,
            QUARANTINED,
            CheckpointMark(cause="operator", manifest_hash=one.manifest_hash),
        )
    assert stored_checkpoints(storage) == []
    if isinstance(storage, Folder):
        assert storage.folders() == []
        assert not quarantine(storage, one, CheckpointMark(cause="operator"))
        with pytest.raises(MissingError):
            mark(storage, 100, PINNED, CheckpointMark(by="ann"))
        storage.put("hidden/manifest.json", [b"{}"])
        assert storage.publish("hidden", step_name(100))
    save(place, JOB, 100, size=5)
    there = look(storage, 100)
    assert there is not None
    assert there.quarantined is None


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_what_goes_while_it_is_read_is_not_called_corrupt(
    storage: Storage, place: str, tmp_path: Path, what: str
) -> None:
    """Retention has it, or another save of its step has its place."""
    save(place, JOB, 100)
    one = look(storage, 100)
    assert one is not None

    def goes(_: int) -> None:
        if what == "removed":
            storage.remove(step_name(100))
        else:
            save(place, JOB, 100, size=5)

    said = "was removed" if what == "removed" else "was replaced"
    with pytest.raises(GoneError, match=said):
        verify(storage, one, goes)
    save(place, JOB, 100)
    with pytest.raises(GoneError, match=said):
        pull(storage, one, str(tmp_path / "pulled"), goes)
    assert stored_checkpoints(storage_for(str(tmp_path / "pulled"))) == []


def test_a_checkpoint_is_pulled_whole_and_good(
    storage: Storage, place: str, tmp_path: Path
) -> None:
    save(place, JOB, 100)
    one = look(storage, 100)
    assert one is not None
    to = str(tmp_path / "pulled")
    path, verdict = pull(storage, one, to)
    assert verdict.is_good
    here = storage_for(to)
    assert path == f"{to}/step-000000100"
    assert [found.manifest_hash for found in stored_checkpoints(here)] == [one.manifest_hash]
    assert [verify(here, found).flaw for found in stored_checkpoints(here)] == [""]
    with pytest.raises(StorageError, match="is there already"):
        pull(storage, one, to)


def test_what_is_pulled_has_no_folders_as_torch_wants_it(
    storage: Storage, place: str, tmp_path: Path
) -> None:
    save(place, JOB, 100, inside="100-r1-mark-0/")
    one = look(storage, 100)
    assert one is not None
    assert verify(storage, one).is_good
    path, _ = pull(storage, one, str(tmp_path / "pulled"))
    assert sorted(file.name for file in Path(path).iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
    ]
    here = storage_for(str(tmp_path / "pulled"))
    assert [verify(here, found).flaw for found in stored_checkpoints(here)] == [""]


def test_a_flawed_checkpoint_is_not_seen_where_it_was_pulled_to(
    storage: Storage, place: str, tmp_path: Path
) -> None:
    save(place, JOB, 100)
    flip(place, 100)
    one = look(storage, 100)
    assert one is not None
    path, verdict = pull(storage, one, str(tmp_path / "pulled"))
    assert path == ""
    assert "differs from what was saved" in verdict.flaw
    assert stored_checkpoints(storage_for(str(tmp_path / "pulled"))) == []


def test_nothing_is_pulled_among_another_jobs_checkpoints(
    storage: Storage, place: str, tmp_path: Path
) -> None:
    save(place, JOB, 100)
    one = look(storage, 100)
    assert one is not None
    to = tmp_path / "others"
    storage_for(str(to)).put("owner.json", [msgspec.json.encode({"job": "other"})])
    with pytest.raises(StorageError, match="has checkpoints of other, not of llama"):
        pull(storage, one, str(to))


@pytest.mark.parametrize(
    ("make", "flaw"),
    [
        (os.mkfifo, r"cannot be read: it is a FIFO, not a regular file; "),
        (os.mkdir, r"cannot be read: it is a folder, not a regular file; "),
        (lambda _: None, r"is missing, and 4096 bytes were saved"),
    ],
)
def test_something_else_in_place_of_a_data_file_is_named(
    tmp_path: Path, make: Callable[[Path], object], flaw: str
) -> None:
    save(str(tmp_path), JOB, 100)
    data = tmp_path / step_name(100) / "__1_0.distcp"
    data.unlink()
    make(data)
    storage = storage_for(str(tmp_path))
    one = look(storage, 100)
    assert one is not None
    assert f"{data} {flaw}" in verify(storage, one).flaw


def test_a_manifest_that_is_no_file_hides_no_other_checkpoint(tmp_path: Path) -> None:
    for step in (100, 200):
        save(str(tmp_path), JOB, step)
    manifest = tmp_path / step_name(200) / MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    newest, older = stored_checkpoints(storage_for(str(tmp_path)))
    assert (newest.step, older.step, older.flaw) == (200, 100, "")
    assert "it is a FIFO, not a regular file" in newest.flaw


@pytest.mark.parametrize("name", [step_name(200), f"{step_name(200)}/pinned.json"])
def test_a_link_to_itself_hides_no_other_checkpoint(tmp_path: Path, name: str) -> None:
    save(str(tmp_path), JOB, 100)
    loop = tmp_path / name
    loop.parent.mkdir(exist_ok=True)
    if loop.name == "pinned.json":
        save(str(tmp_path), JOB, 200)
    loop.symlink_to(loop)
    storage = storage_for(str(tmp_path))
    newest, older = stored_checkpoints(storage)
    assert (newest.step, older.step, older.flaw) == (200, 100, "")
    assert newest.pinned is not None
    assert f"{loop}" in newest.pinned.reason + newest.flaw
    storage.remove(step_name(200))
    assert [checkpoint.step for checkpoint in stored_checkpoints(storage)] == [100]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path)])
def test_an_owner_that_is_no_file_is_named_once(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    owner = tmp_path / "owner.json"
    make(owner)
    with pytest.raises(StorageError) as refused:
        owner_of(storage_for(str(tmp_path)))
    assert str(refused.value).count(str(owner)) == 1
