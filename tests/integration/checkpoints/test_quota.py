"""States of a node's own ranks that have no room on the node: saves go on without."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import JOB, Saving, load, same, saving
from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint.image_folder import ON_DISK
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.manifest import IMAGE
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.save import buffers

STATE: dict[str, Any] = {"a": torch.arange(1 << 18)}
BLANK: dict[str, Any] = {"a": torch.zeros(1 << 18, dtype=torch.int64)}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


def about(folder: Path, most: int) -> JobContext:
    return JobContext(JOB, 1, str(folder / "images"), has_keeper=True, images_most_bytes=most)


def images(folder: Path) -> list[Path]:
    return list((folder / "images").rglob(IMAGE))


def refusals(rank: Saving) -> list[dict[str, Any]]:
    return [one for one in rank.events("failed") if one["error"] == "quota"]


def test_before_a_byte_is_written_and_said_once(folder: Path) -> None:
    """The refusal names the setting to raise (A9.6)."""
    most = 5 << 20
    with saving(folder, keeps=True, buffers=3, context=about(folder, most)) as rank:
        rank.saver.prepare(STATE)
        for step in (1, 2):
            assert rank.save(step, STATE) is not None
            assert rank.finish() == [step]
        assert images(folder) == []
        assert rank.events("image") == []
        (said,) = refusals(rank)
        assert (said["step"], said["tier"], said["stage"]) == (1, "memory", "keep")
        assert rank.told.warned == [said["reason"]]
        assert "3 copies need 7 MiB, and the limit is 5 MiB" in said["reason"]
        assert "raise agent.checkpoints.own_most_bytes" in said["reason"]
        assert said["reason"].endswith(f"saves to {folder / 'root'} go on")
    assert same(load(folder, 2, dict(BLANK)), STATE)


def test_what_fits_is_kept(folder: Path) -> None:
    with saving(folder, keeps=True, buffers=2, context=about(folder, 5 << 20)) as rank:
        rank.save(1, STATE)
        assert rank.finish() == [1]
        assert len(rank.events("image")) == 1
        assert not rank.told.warned


def test_a_state_that_grows_past_it_leaves_the_last_one_that_was_whole(folder: Path) -> None:
    larger = STATE | {"b": torch.zeros(1 << 20)}
    with saving(folder, keeps=True, buffers=2, context=about(folder, 5 << 20)) as rank:
        rank.save(1, STATE)
        rank.finish()
        (whole,) = rank.events("image")
        rank.save(2, larger)
        assert rank.finish() == [2]
        assert len(refusals(rank)) == 1
        assert (Path(whole["folder"]) / "index.json").exists()
        assert len(rank.events("image")) == 1


def test_with_no_other_place_nothing_is_saved_and_that_is_said(folder: Path) -> None:
    with saving(folder, root="", keeps=True, buffers=2, context=about(folder, 1 << 20)) as rank:
        assert rank.save(1, STATE, to_root=False) is None
        assert rank.save(2, STATE, to_root=False) is None
        (said,) = refusals(rank)
        assert said["reason"].endswith("nothing is saved, as there is no other place")
    assert images(folder) == []


def test_one_ranks_images_are_too_large_and_all_go_on_without(folder: Path) -> None:
    def one(group: RankGroup) -> int:
        context = about(folder, (1 << 20) if group.rank else 0)
        with saving(folder, group, keeps=True, buffers=2, context=context) as rank:
            rank.save(1, STATE)
            assert rank.finish() == [1], rank.told
            assert rank.events("image") == []
            return len(refusals(rank))

    assert together(2, one) == [0, 1]
    assert images(folder) == []
    assert same(load(folder, 1, dict(BLANK)), STATE)


@pytest.mark.parametrize("at_first", [True, False])
def test_one_ranks_disk_is_full_and_all_save_to_the_root_without_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at_first: bool
) -> None:
    """Reported once; saves into memory alone are skipped, and are not failures."""
    plain = buffers.free_bytes

    def free_bytes(descriptor: int) -> int:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
        is_full = "rank-1" in place and (at_first or "/b/" in place)
        return 0 if is_full else plain(descriptor)

    def one(group: RankGroup) -> tuple[list[str], int]:
        with saving(folder, group, "fatal", keeps=True, buffers=2) as rank:
            for step in (1, 2, 3):
                assert rank.save(step, STATE) is not None
                assert rank.finish() == [step]
            assert rank.save(4, STATE, to_root=False) is None
            assert rank.queue.await_all() is None
            return rank.told.warned, len(rank.events("image"))

    (folder / "images").mkdir()
    (folder / "images" / ON_DISK).touch()
    monkeypatch.setattr(buffers, "free_bytes", free_bytes)
    (warned, kept), (warned_there, kept_there) = together(2, one)
    assert (warned, kept, kept_there) == ([], not at_first, not at_first)
    (line,) = warned_there
    assert "the disk of" in line
    assert line.endswith(f"saves to {folder / 'root'} go on")
    assert same(load(folder, 3, dict(BLANK)), STATE)
