"""States on a disk of the node: durable before they count, there after a reboot (E5)."""

import os
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from xxhash import xxh3_128

from everstep.clock import SystemClock
from everstep_services.agent.replicas.local_root import LocalRootError, check_local_root
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.state_folder import LeftoverPolicy, opened_images
from tests.checkpoint_helpers.saved_by import JOB, saving
from tests.unit.trainer_sdk.checkpoint.saved_states import KeptReports, together
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, Identity
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.discovery import RestoreContext
from trainer_sdk.checkpoint.restore.restore import Restore, Restored
from trainer_sdk.checkpoint.save import buffers
from trainer_sdk.checkpoint.save.buffers import NoRoomError, folder_of
from trainer_sdk.checkpoint.writer import files
from trainer_sdk.checkpoint.writer.protocol import WriteState

ROOT = "36 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
DISK = LeftoverPolicy(for_s=600, is_on_disk=True)


def state_of(value: int) -> dict[str, Any]:
    return {"a": torch.full((1 << 12,), value)}


def saved(images: Path, steps: list[int], number: int = 1) -> KeptReports:
    """By one rank, which then ends; its agent keeps what it has left."""

    def one(group: RankGroup) -> KeptReports:
        context = JobContext(JOB, number, str(images), has_keeper=True)
        with saving(images, group, root="", keeps=True, buffers=2, context=context) as rank:
            for step in steps:
                rank.save(step, state_of(step), to_root=False)
                rank.finish()
            rank.saver.close(keeps_images=True)
            return rank.told

    (told,) = together(1, one)
    return told


def restored(images: Path, number: int = 2) -> Restored | None:
    """By the rank of a later round."""

    def one(group: RankGroup) -> Restored | None:
        home = RestoreContext(
            job=JOB, round=number, rank=0, world_size=1, images=images, storage=None
        )
        state = state_of(0)
        found = Restore(home, group, KeptReports()).restore(state)
        assert found is None or set(state["a"].tolist()) == {found.step}
        return found

    (found,) = together(1, one)
    return found


def image_of(images: Path, step: int) -> Path:
    """The file that holds a step."""
    told = f'"step":{step},'.encode()
    (index,) = [one for one in images.rglob(INDEX) if told in one.read_bytes()]
    return index.with_name(IMAGE)


def left_by_killed(root: Path, job: str = JOB) -> Path:
    """As after a power cut: whole states, no word of their agent, no lock held."""
    with opened_images(job, "n1", root, DISK) as folder:
        assert folder is not None
        saved(folder, [10, 20])
        shutil.copytree(folder, root / "kept")
    shutil.rmtree(folder)
    (root / "kept").rename(folder)
    (folder / "left.json").unlink(missing_ok=True)
    return folder


def test_an_image_counts_once_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index, by which a state counts and the other buffer may be filled, comes last."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(file: int) -> None:
        seen.append("sync " + Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def named(before: Path, after: Path) -> None:
        seen.append(f"name {Path(after).name}")
        replace(before, after)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    keep_one(tmp_path / "images")
    assert seen == [
        *["sync image", "sync .index.json", "name index.json", "sync a"],
        *["sync rank-0", "sync own", "sync images"],
    ]


def keep_one(images: Path) -> None:
    """What a writer does with an image, in this process."""
    folder = images / "own" / "rank-0" / "a"
    folder.mkdir(parents=True)
    (folder / IMAGE).write_bytes(b"[]")
    order = msgspec.convert(
        {
            "save": 1,
            "image": str(folder / IMAGE),
            "folder": str(folder),
            "rank": 0,
            "identity": Identity(job="j", round=1, step=1, world_size=1, layout="l"),
            "file_bytes": 0,
            "image_bytes": 2,
            "metadata": (0, 0),
            "entries": (0, 2),
            "root": "",
            "saving": "",
            "shard": "",
            "keep": True,
            "within_s": 9.0,
        },
        WriteState,
    )
    files.keep_image(order, memoryview(b"[]"), xxh3_128(), lambda: None)


def test_after_a_reboot_the_newest_is_restored_from_the_disk(tmp_path: Path) -> None:
    left = left_by_killed(tmp_path)
    with opened_images(JOB, "n1", tmp_path, DISK) as folder:
        assert folder == left
        found = restored(folder)
    assert found is not None
    assert (found.step, found.tier) == (20, "disk")


def test_a_torn_newest_image_leaves_the_one_before(tmp_path: Path) -> None:
    left = left_by_killed(tmp_path)
    with image_of(left, 20).open("r+b") as file:
        file.seek(100)
        file.write(b"torn")
    with opened_images(JOB, "n1", tmp_path, DISK) as folder:
        assert folder == left
        found = restored(folder)
    assert found is not None
    assert (found.step, found.tier) == (10, "disk")


def test_a_save_that_is_cut_off_before_it_is_durable_leaves_the_last_one(tmp_path: Path) -> None:
    """The buffer of the oldest is written over; its old index came back with the power."""
    left = left_by_killed(tmp_path)
    with image_of(left, 10).open("r+b") as file:
        file.write(bytes(range(64)))  # of step 30, not all of it
    found = restored(left)
    assert found is not None
    assert (found.step, found.tier) == (20, "disk")


def test_a_killed_agent_of_another_job_keeps_its_states_for_a_while(tmp_path: Path) -> None:
    """In memory they are removed at once: those of a disk are what a reboot is survived by."""
    left = left_by_killed(tmp_path)
    with opened_images("other", "n1", tmp_path, DISK):
        assert left.exists()

    @dataclass
    class Later(SystemClock):
        def wall(self) -> datetime:
            return datetime.fromtimestamp(time.time() + 700, UTC)

    late = LeftoverPolicy(for_s=600, is_on_disk=True, clock=Later())
    with opened_images("other", "n1", tmp_path, late):
        assert not left.exists()


def test_foreign_files_stay_and_a_good_end_leaves_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    departure = LeftoverPolicy(for_s=600, is_on_disk=True)
    with opened_images(JOB, "n1", tmp_path, departure) as folder:
        assert folder is not None
        saved(folder, [10])
        departure.stays = False
    assert not list(tmp_path.rglob(IMAGE))
    assert (tmp_path / "mine").read_text() == "x"


def test_a_full_disk_is_said_and_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_images(JOB, "n1", tmp_path, DISK) as folder:
        assert folder is not None
        saved(folder, [10])
        monkeypatch.setattr(buffers, "free_bytes", lambda _: 0)
        arena = buffers.Arena(2, folder_of(str(folder), 0))
        with pytest.raises(NoRoomError, match=r"the disk of .* free some space, or have local_"):
            next(one for one in arena.spare() if one.step is None).fit(1 << 30)
        arena.close(keeps_images=True)
        found = restored(folder)
    assert found is not None
    assert found.step == 10


@pytest.mark.parametrize(
    ("name", "mounts", "said"),
    [
        ("missing", ROOT, "there is no such folder: make it, or mount the disk"),
        ("file", ROOT, "is not a folder"),
        ("there", ROOT + "37 36 0:9 / {root} rw - nfs4 srv:/x rw\n", "it is in nfs4, a network"),
        ("there", ROOT + "37 36 0:9 / {root} rw - fuse.glusterfs s rw\n", "fuse.glusterfs, a net"),
    ],
)
def test_a_folder_that_will_not_do_is_refused_in_a_line(
    tmp_path: Path, name: str, mounts: str, said: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    table = tmp_path / "table"
    table.write_text(mounts.format(root=tmp_path))
    with pytest.raises(LocalRootError, match=said) as told:
        check_local_root(tmp_path / name, table)
    assert "\n" not in str(told.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LocalRootError, match="may not write there"):
        check_local_root(tmp_path)


def test_a_folder_on_a_disk_below_other_mounts_will_do(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text(ROOT + f"37 36 0:9 / {tmp_path}-x rw - nfs4 srv:/x rw\n")
    check_local_root(tmp_path, table)


def test_states_stay_for_longer_on_a_disk(tmp_path: Path) -> None:
    assert CheckpointSettings().states_left_for_s == 3600
    assert CheckpointSettings(local_root=tmp_path).states_left_for_s == 3 * 86400
    assert CheckpointSettings(local_root=tmp_path, left_for_s=5).states_left_for_s == 5
