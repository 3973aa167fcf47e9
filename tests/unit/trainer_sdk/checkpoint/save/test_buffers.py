"""The memory of saves: its size, its owner, and the image in it."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.checkpoint.manifest import INDEX, Identity, ImageIndex, encode
from trainer_sdk.checkpoint.save import buffers
from trainer_sdk.checkpoint.save.buffers import Arena, Buffer, NoRoomError, TakenError

SIZE = 1 << 16


def hold(buffer: Buffer, step: int) -> None:
    """The index that a writer leaves."""
    identity = Identity(job="j", round=1, step=step, world_size=1, layout="l")
    index = ImageIndex(identity=identity, rank=0, size_bytes=1, hash="h", entries=())
    (Path(buffer.folder) / INDEX).write_bytes(encode(index))
    buffer.holds = identity


def test_a_buffer_keeps_its_memory_while_the_size_stays() -> None:
    buffer = Buffer()
    buffer.fit(SIZE)
    before = buffer.octets
    buffer.octets.fill_(7)
    buffer.fit(SIZE)
    assert buffer.octets is before
    with open(buffer.path, "rb") as seen:
        assert seen.read() == bytes([7]) * SIZE
    buffer.fit(2 * SIZE)
    assert buffer.octets.numel() == 2 * SIZE
    buffer.remove()
    assert not os.path.exists(buffer.path)


def test_too_little_memory_is_reported_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal has what is needed and what is left (A8.4)."""
    monkeypatch.setattr(buffers, "available_bytes", lambda _: SIZE - 1)
    with pytest.raises(NoRoomError, match="has 0 MiB left, and the save needs 1 MiB") as told:
        Buffer().fit(SIZE)
    assert (told.value.needed_bytes, told.value.available_bytes) == (SIZE, SIZE - 1)


def test_a_limit_of_the_process_is_a_failed_save_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernel refuses, the training goes on."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        NoRoomError, match=r"cannot be had: File too large \(the limit of ulimit -f"
    ):
        Buffer().fit(SIZE)


def test_a_container_leaves_less_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in [
        ("memory.max", "1000000\n"),
        ("memory.current", "900000\n"),
        ("memory.stat", "anon 1\ninactive_file 50000\n"),
    ]:
        (tmp_path / name).write_text(said)
    monkeypatch.setattr(buffers, "_CGROUP", tmp_path)
    assert buffers.available_bytes(None) == 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert buffers.available_bytes(None) > 1 << 20


def test_the_next_process_of_a_rank_finds_its_images_and_fills_the_older_one(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "images" / "own" / "rank-3")
    first = Arena(2, folder)
    for one, step in zip(first.buffers, (8, 9), strict=True):
        one.fit(SIZE)
        hold(one, step)
    first.close(keeps_images=True)
    second = Arena(2, folder)
    assert [one.step for one in second.buffers] == [8, 9]
    chosen = second.next()
    assert chosen is second.buffers[0]
    chosen.is_free = False
    assert second.next() is None, "the newest image stays"
    second.close(keeps_images=False)
    assert not (tmp_path / "images").exists()


def test_two_images_of_one_step_leave_one_to_fill(tmp_path: Path) -> None:
    both = Arena(2, str(tmp_path / "images" / "own" / "rank-0"))
    for one in both.buffers:
        one.fit(SIZE)
        hold(one, 5)
    assert both.next() is not None
    both.close(keeps_images=False)


def test_another_process_with_the_same_images_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_WITHIN_S", 0.0)
    folder = tmp_path / "images" / "own" / "rank-0"
    folder.mkdir(parents=True)
    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(TakenError, match="give this training a job of its own"):
        Arena(1, str(folder))
    os.close(held)
    Arena(1, str(folder)).close(keeps_images=False)


def test_a_wait_for_images_that_are_removed_makes_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process may end between any two looks, and removes its folder and its lock."""
    folder = str(tmp_path / "images" / "own" / "rank-0")
    os.makedirs(folder)
    before = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT)
    real = fcntl.flock
    real(before, fcntl.LOCK_EX)
    looks: list[int] = []

    def flock(held: int, how: int) -> None:
        looks.append(held)
        if len(looks) == 2:  # what it has opened is removed before it has it
            shutil.rmtree(folder)
            os.close(before)
        real(held, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(buffers, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(buffers, "_WITHIN_S", 1e9)
    after = Arena(1, folder)
    assert len(looks) == 3
    with pytest.raises(BlockingIOError), open(f"{folder}/lock") as held:
        real(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    after.close(keeps_images=False)


def test_a_folder_that_is_removed_while_its_lock_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "images" / "own" / "rank-0"
    folder.parent.mkdir(parents=True)
    real = os.makedirs
    made: list[str] = []

    def makedirs(path: str, *how: Any, **named: Any) -> None:
        real(path, *how, **named)
        made.append(path)
        if len(made) == 1:
            folder.rmdir()

    monkeypatch.setattr(os, "makedirs", makedirs)
    monkeypatch.setattr(buffers, "_WITHIN_S", 1e9)
    Arena(1, str(folder)).close(keeps_images=False)
    assert len(made) == 2
    assert not folder.exists()


def test_a_torn_index_is_not_taken_for_an_image(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(msgspec.json.encode({"identity": {}}))
    assert Buffer(str(tmp_path)).step is None


def test_the_agents_variables_give_the_job_context() -> None:
    said = {"EVERSTEP_JOB": "llama", "EVERSTEP_ROUND": "4", "EVERSTEP_IMAGES": "/dev/shm/x"}
    about = read_job_context(said)
    assert (about.job, about.round, about.images, about.has_keeper) == (
        "llama",
        4,
        "/dev/shm/x",
        True,
    )
    assert about.images_most_bytes == 0
    assert read_job_context(said | {"EVERSTEP_IMAGES_MOST": "7"}).images_most_bytes == 7
    assert read_job_context(said, job="mine").job == "mine"


def test_jobs_without_a_name_are_identified_by_their_place() -> None:
    one, other = read_job_context({}, root="/a"), read_job_context({}, root="/b")
    assert one.job == other.job == "local"
    assert one.images != other.images
    assert not one.has_keeper


def test_an_image_has_the_bytes_of_the_file() -> None:
    buffer = Buffer()
    buffer.fit(SIZE)
    buffer.octets[10:14].copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    assert buffer.mapped[10:14] == b"\x01\x02\x03\x04"
    buffer.close()
