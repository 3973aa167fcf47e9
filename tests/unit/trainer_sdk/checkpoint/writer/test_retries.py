"""Retries of a save neither tear nor lose files that an earlier attempt has made durable."""

import mmap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_sdk.checkpoint.manifest import Identity, step_name
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import Verification, look, verify
from trainer_sdk.checkpoint.storage.names import SAVING
from trainer_sdk.checkpoint.writer.disk import StreamHash, WriteGate
from trainer_sdk.checkpoint.writer.files import place_of, write_shard
from trainer_sdk.checkpoint.writer.protocol import SaveDone, WriteState
from trainer_sdk.checkpoint.writer.publication import settle

STEP, SIZE = 5, 2 * mmap.PAGESIZE


@pytest.fixture(params=["folder", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def order(root: str, rank: int) -> WriteState:
    identity = Identity(job="j", round=1, step=STEP, world_size=2, layout="l")
    return WriteState(
        save=1,
        image="",
        identity=identity,
        rank=rank,
        file_bytes=SIZE,
        image_bytes=SIZE,
        metadata=(0, 0),
        entries=(0, 0),
        root=root,
        saving="5-r1-0a-1",
        shard=f"__{rank}_0.distcp",
        within_s=0.0,
    )


def state(rank: int) -> memoryview:
    """The content of a buffer: whole pages that can be written past the cache."""
    octets = mmap.mmap(-1, SIZE)
    octets.write(bytes([rank + 1]) * SIZE)
    return memoryview(octets)


def write(root: str, rank: int) -> str:
    """An attempt to make this rank's part durable; returns the hash of its bytes."""
    hasher = StreamHash(SIZE, lambda _: None)
    write_shard(order(root, rank), [state(rank)], hasher, WriteGate(SIZE), lambda: None)
    return hasher.hexdigest()


def publish(root: str, rank: int = 0) -> SaveDone:
    return settle(order(root, rank), b"torch's own", lambda _: None)


def seen(root: str) -> Verification:
    storage = storage_for(root)
    there = look(storage, STEP)
    assert there is not None
    return verify(storage, there)


class DiskError(Exception):
    pass


def broken(rank: int) -> Iterator[memoryview]:
    yield state(rank)[: SIZE // 2]
    raise DiskError


def test_a_durable_part_is_not_written_again(root: str) -> None:
    write(root, 0)
    first = write(root, 1)
    with pytest.raises(DiskError):
        write_shard(
            order(root, 1),
            broken(1),
            StreamHash(SIZE, lambda _: None),
            WriteGate(SIZE),
            lambda: None,
        )
    assert write(root, 1) == first
    publish(root)
    assert seen(root).is_good


def test_the_part_of_a_stuck_writer_never_names_a_torn_shard(tmp_path: Path) -> None:
    """A retry begins while the first attempt still writes, and rank 0 publishes early."""
    root = str(tmp_path)
    write(root, 0)
    write(root, 1)
    place = place_of(root, order(root, 1).saving, STEP)
    part = tmp_path / place.before / "part-00001.json"
    said = part.read_bytes()
    part.unlink()

    def windows() -> Iterator[memoryview]:
        yield state(1)[: SIZE // 2]
        part.write_bytes(said)
        publish(root)
        yield state(1)[SIZE // 2 :]

    with pytest.raises(FileNotFoundError):
        write_shard(
            order(root, 1),
            windows(),
            StreamHash(SIZE, lambda _: None),
            WriteGate(SIZE),
            lambda: None,
        )
    assert seen(root).is_good
    write(root, 1)
    assert publish(root, 1).given_up == ""


def test_a_retry_recognizes_its_own_visible_checkpoint(root: str) -> None:
    """Also for rank 0, whose first attempt has moved all parts."""
    hashes = [write(root, rank) for rank in (0, 1)]
    done = publish(root)
    assert done.shards == 2
    assert [write(root, rank) for rank in (0, 1)] == hashes
    assert storage_for(root).files(SAVING) == [], "it is not written again"
    assert [publish(root, rank) for rank in (0, 1)] == [done, done]
    assert seen(root).is_good
    assert storage_for(root).folders() == [step_name(STEP)]
