"""Reads of ranges: each range has its bytes, and near ranges share a request."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer_sdk.checkpoint.storage import port
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.port import ByteRange, StorageError, read_ranges

FILES = {name: random.Random(name).randbytes(1000) for name in ("a", "b")}
MOST, BETWEEN = 100, 10


class Noting(Folder):
    """A storage that notes the size of each request."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.reads: list[int] = []

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        found = super().read(name, start, length)
        self.reads.append(len(found))
        return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noting:
    monkeypatch.setattr(port, "_MOST_BYTES", MOST)
    monkeypatch.setattr(port, "_MOST_BETWEEN_BYTES", BETWEEN)
    for name, octets in FILES.items():
        (tmp_path / name).write_bytes(octets)
    return Noting(tmp_path)


pieces = st.builds(
    ByteRange, st.sampled_from(sorted(FILES)), st.integers(0, 800), st.integers(0, 200)
)


@settings(suppress_health_check=list(HealthCheck))
@given(wanted=st.lists(pieces, max_size=40))
def test_each_range_has_the_bytes_of_its_file(folder: Noting, wanted: list[ByteRange]) -> None:
    folder.reads.clear()
    found = {number: bytes(octets) for number, octets in read_ranges(folder, wanted)}
    assert found == {
        number: FILES[one.file][one.offset : one.end] for number, one in enumerate(wanted)
    }
    assert len(folder.reads) <= len(wanted)
    assert max(folder.reads, default=0) <= max(MOST, *(one.length for one in wanted), 0)


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_the_requests_grow_with_the_bytes_alone(folder: Noting, size: int) -> None:
    wanted = [ByteRange("a", at, size) for at in range(0, 1000, size)]
    random.Random(size).shuffle(wanted)
    assert len([*read_ranges(folder, wanted)]) == 1000 // size
    assert folder.reads == [MOST] * 10


def test_a_large_gap_is_not_read(folder: Noting) -> None:
    wanted = [
        ByteRange("a", 0, 5),
        ByteRange("a", 5 + BETWEEN, 5),
        ByteRange("a", 21 + 2 * BETWEEN, 5),
    ]
    assert len([*read_ranges(folder, wanted)]) == 3
    assert folder.reads == [10 + BETWEEN, 5]


def test_a_truncated_file_is_reported(folder: Noting) -> None:
    with pytest.raises(StorageError, match="it is cut short"):
        [*read_ranges(folder, [ByteRange("a", 990, 5), ByteRange("a", 998, 5)])]
