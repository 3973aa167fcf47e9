"""The file of a shard has all of its room before anything is written into it."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from trainer_sdk.checkpoint.writer import disk

SIZE = 2 * disk.CHUNK_BYTES + 4096
OCTETS = mmap.mmap(-1, SIZE)
OCTETS[:] = os.urandom(SIZE)


def write(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    disk.write_hashed(str(path), SIZE, (memoryview(OCTETS),), hasher, lambda: None)
    return hasher.hexdigest()


def has_fallocate(monkeypatch: pytest.MonkeyPatch, call: Callable[..., int] | None) -> None:
    """The C library has this one, or none."""
    library = SimpleNamespace() if call is None else SimpleNamespace(fallocate=call)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)


def fails_with(number: int) -> Callable[..., int]:
    def fallocate(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    return fallocate


def test_the_room_is_there_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []
    pwrite = os.pwrite

    def noted(descriptor: int, octets: memoryview, at: int) -> int:
        rooms.append(os.fstat(descriptor).st_blocks * 512)
        return pwrite(descriptor, octets, at)

    monkeypatch.setattr(os, "pwrite", noted)
    assert write(tmp_path / "shard") == xxhash.xxh3_128_hexdigest(OCTETS[:])
    assert min(rooms) >= SIZE
    assert (tmp_path / "shard").read_bytes() == OCTETS[:]


@pytest.mark.parametrize("call", [None, fails_with(errno.EOPNOTSUPP), fails_with(errno.ENOSYS)])
def test_a_file_system_that_cannot_reserve_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., int] | None
) -> None:
    has_fallocate(monkeypatch, call)
    write(tmp_path / "shard")
    assert (tmp_path / "shard").read_bytes() == OCTETS[:]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_where_there_is_no_room_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    has_fallocate(monkeypatch, fails_with(number))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("it was written to"))
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        write(tmp_path / "shard")
    assert error.value.errno == number
