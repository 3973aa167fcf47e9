"""Memory for states that come: it is used again, and nothing is seen that has a hole."""

import errno
import mmap
import os
from pathlib import Path

import pytest
import xxhash

from everstep_services.agent.replicas.images import OwnImages
from everstep_services.agent.replicas.memory_file import MappedFiles, MemoryFile
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.store import ReplicaStore
from everstep_services.agent.replicas.transfer.protocol import Copy
from tests.integration.replicas.nodes import JOB, state_of
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, Identity, ImageIndex, encode

PIECE = 1000
SIZE = 40 * PIECE + 17


def fill(memory: MemoryFile, octets: bytes, at: int = 0) -> None:
    while room := memory.room(at, min(PIECE, len(octets) - at)):
        room[:] = octets[at : at + len(room)]
        memory.wrote(at, room)
        at += len(room)


def test_what_was_given_is_in_the_file_when_the_last_piece_is_taken(tmp_path: Path) -> None:
    path, first, second = tmp_path / "image", state_of(0, 1, SIZE), state_of(0, 2, SIZE)
    memory = MemoryFile(path, SIZE)
    fill(memory, first)
    assert path.read_bytes() == first
    memory.begin_again(path)  # through a mapping from now on
    fill(memory, second)
    assert path.read_bytes() == second


def test_whoever_has_the_last_one_mapped_reads_on_when_the_next_is_smaller(tmp_path: Path) -> None:
    path, first, second = tmp_path / "image", state_of(0, 1, SIZE), state_of(0, 2, 2 * PIECE)
    fill(MemoryFile(path, SIZE), first)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    fill(MemoryFile(path, len(second)), second)
    assert mapped[:] == first
    assert path.read_bytes() == second


def copy_of(octets: bytes) -> Copy:
    digest = xxhash.xxh3_128_hexdigest(octets)
    identity = Identity(job=JOB, round=1, step=10, world_size=8, layout="l")
    index = ImageIndex(identity=identity, rank=0, size_bytes=SIZE, hash=digest, entries=())
    return Copy(slot=0, rank=0, ranks=1, step=10, size_bytes=SIZE, hash=digest, index=encode(index))


def receive(store: ReplicaStore, octets: bytes) -> int:
    """As from a connection; from where on it was."""
    incoming = store.begin(copy_of(octets))
    assert incoming is not None
    offset = incoming.offset
    try:
        while room := incoming.room(PIECE):
            room[:] = octets[incoming.offset : incoming.offset + len(room)]
            incoming.took(room)
        store.finish(incoming)
    finally:
        store.pause(incoming)
    return offset


def test_a_write_that_fails_leaves_no_hole_and_what_came_before_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    octets, write, fails = state_of(0, 10, SIZE), os.pwrite, [True]

    def pwrite(file: int, piece: memoryview, at: int) -> int:
        if at == 3 * PIECE and fails and fails.pop():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, piece, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    store = ReplicaStore(tmp_path, JOB, CheckpointSettings(room_least_bytes=0))
    with pytest.raises(OSError, match="No space left"):
        receive(store, octets)
    assert receive(store, octets) == 3 * PIECE
    (held,) = store.of_rank(0)
    assert held.path.read_bytes() == octets
    assert store.begin(copy_of(octets)) is None


def test_what_is_no_regular_file_is_read_by_nobody(tmp_path: Path) -> None:
    """A FIFO in place of an index or an image would hold a thread of the agent for ever."""
    place = tmp_path / "own" / "rank-0" / "a"
    place.mkdir(parents=True)
    os.mkfifo(place / INDEX)
    os.mkfifo(place / IMAGE)
    assert OwnImages(tmp_path, "j").of(0) == []
    with pytest.raises(OSError, match="a FIFO, not a regular file"):
        MappedFiles().of(place / IMAGE, 1)
