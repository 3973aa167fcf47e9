"""Leftovers of failed saves: found by age and name, and nothing else touched."""

from datetime import datetime, timedelta

import pytest

from tests.checkpoint_helpers.checkpoint_shelves import save
from trainer_sdk.checkpoint.manifest import MANIFEST, step_name
from trainer_sdk.checkpoint.storage import Storage
from trainer_sdk.checkpoint.storage.checkpoints import PINNED, look, stored_checkpoints, verify
from trainer_sdk.checkpoint.storage.leftovers import leftovers, sweep
from trainer_sdk.checkpoint.storage.names import pulling_name, replaced_name, saving_name, saving_of

JOB = "llama"
DEAD, LIVE = saving_name(100, 1, "0a1b2c3d", 7), saving_name(100, 2, "ffffffff", 1)


@pytest.fixture
def later(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a day has passed, by the storage's own clock."""
    real = type(storage).now

    def now(self: Storage) -> datetime:
        return real(self) + timedelta(hours=25)

    monkeypatch.setattr(type(storage), "now", now)


def half(storage: Storage, folder: str) -> None:
    """What a save leaves that has died before its manifest."""
    for name in ("__0_0.distcp", "part-00000.json"):
        storage.put(f"{folder}/{name}", [b"12345"])


def found(storage: Storage, live_round: int | None = None) -> list[str]:
    return [one.folder for one in leftovers(storage, live_round=live_round)]


def test_a_storage_says_what_time_it_is_and_leaves_no_mark(storage: Storage) -> None:
    storage.put("a/b/1", [b"1"])
    (file,) = storage.files("a")
    assert file.changed_at.tzinfo is not None
    assert timedelta() <= storage.now() - file.changed_at < timedelta(hours=1)
    assert storage.folders() == ["a"]
    assert storage.folders("a") == ["b"]
    assert storage.folders("nothing") == []
    assert storage.files(".clock") == []


def test_a_save_that_may_be_in_progress_is_not_touched(storage: Storage) -> None:
    half(storage, f"step-000000100/{DEAD}")
    half(storage, f".saving/{DEAD}")
    assert found(storage) == []


@pytest.mark.usefixtures("later")
def test_what_a_dead_save_has_left_is_found_and_goes(storage: Storage, place: str) -> None:
    save(place, JOB, 100, inside=f"{LIVE}/")
    for folder in (f"step-000000100/{DEAD}", f"step-000000300/{saving_name(300, 1, '0a', 9)}"):
        half(storage, folder)
    half(storage, f".saving/{DEAD}")
    half(storage, f".saving/{pulling_name(step_name(200))}")
    left = leftovers(storage)
    assert [(one.step, one.folder, one.size_bytes) for one in left] == [
        (300, "step-000000300/300-r1-0a-9", 10),
        (200, ".saving/pull-step-000000200", 10),
        (100, f"step-000000100/{DEAD}", 10),
        (100, f".saving/{DEAD}", 10),
    ]
    assert "its save has failed, and nothing has changed in it for 25 h" in left[0].reason
    assert [sweep(storage, one) for one in left] == [10, 10, 10, 10]
    assert leftovers(storage) == []
    (kept,) = stored_checkpoints(storage)
    assert verify(storage, kept).is_good


@pytest.mark.usefixtures("later")
def test_what_a_running_round_may_still_write_stays(storage: Storage) -> None:
    half(storage, f"step-000000100/{DEAD}")
    half(storage, f"step-000000100/{LIVE}")
    half(storage, f".saving/{LIVE}")
    assert found(storage, live_round=2) == [f"step-000000100/{DEAD}"]
    assert found(storage, live_round=1) == []


@pytest.mark.usefixtures("later")
def test_only_names_that_saves_give_are_looked_at(storage: Storage, place: str) -> None:
    save(place, JOB, 100)
    for folder in (
        "step-000000100/notes",
        "step-000000100/101-r1-0a-1",  # of another step
        "mine/100-r1-0a-1",
        ".saving/mine",
        ".replaced/mine",
        ".replaced/step-000000100-before-lunch",
    ):
        half(storage, folder)
    assert found(storage) == []


@pytest.mark.usefixtures("later")
def test_beside_a_manifest_that_cannot_be_read_everything_stays(
    storage: Storage, place: str
) -> None:
    save(place, JOB, 100, inside=f"{LIVE}/")
    half(storage, f"step-000000100/{DEAD}")
    octets = storage.read(f"{step_name(100)}/{MANIFEST}")
    storage.put(f"{step_name(100)}/{MANIFEST}", [octets[:-3]])
    assert found(storage) == []


@pytest.mark.usefixtures("later")
def test_what_has_changed_since_it_was_looked_at_stays(storage: Storage) -> None:
    half(storage, f"step-000000100/{DEAD}")
    (one,) = leftovers(storage)
    before = one.changed_at - timedelta(seconds=2)
    seen_earlier = type(one)(one.step, one.folder, one.size_bytes, before, one.reason)
    assert sweep(storage, seen_earlier) is None
    assert found(storage) == [one.folder]


def test_what_made_room_stays_for_a_week_and_for_ever_if_it_is_pinned(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, loose = (replaced_name(step_name(step), LIVE) for step in (100, 200))
    for name in (pinned, loose):
        half(storage, f".replaced/{name}")
    storage.put(f".replaced/{pinned}/{PINNED}", [b"{}"])
    real = storage.now()
    monkeypatch.setattr(type(storage), "now", lambda _: real + timedelta(days=6))
    assert found(storage) == []
    monkeypatch.setattr(type(storage), "now", lambda _: real + timedelta(days=8))
    assert found(storage) == [f".replaced/{loose}"]


@pytest.mark.usefixtures("later")
def test_a_removal_that_broke_off_is_finished(storage: Storage, place: str) -> None:
    """In an object store the manifest goes first: nobody sees the rest, but it is still there."""
    save(place, JOB, 100, inside=f"{DEAD}/")
    storage.delete(f"{step_name(100)}/{MANIFEST}")
    assert look(storage, 100) is None
    assert found(storage) == [f"step-000000100/{DEAD}"]


def test_the_name_of_a_save_says_what_it_is() -> None:
    saving = saving_of(saving_name(5, 3, "0a1b2c3d", 12))
    assert saving is not None
    assert (saving.step, saving.round, saving.mark, saving.count) == (5, 3, "0a1b2c3d", 12)
    assert saving_of("5-r3-0a1b-12-x") is None
