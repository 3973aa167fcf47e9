"""Facts on disk: what survives a crash at any byte, a full spool, a full disk."""

import errno
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.bus.errors import SpoolBusyError, SpoolFullError, SpoolWriteError
from everstep.bus.facts import spool as spool_module
from everstep.bus.facts.spool import Position, Spool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


@pytest.fixture
def spool(folder: Path) -> Iterator[Spool]:
    opened = Spool.open(folder, segment_bytes=200)
    yield opened
    opened.close()


def everything(spool: Spool, start: Position | None = None) -> list[bytes]:
    at = start or spool.acked
    found: list[bytes] = []
    while True:
        records, after = spool.read(at, 3)
        if not records:
            return found
        found += records
        at = after


@contextmanager
def unsynced() -> Iterator[None]:
    """No power cut must be survived here, and a thousand syncs take as long as the disk likes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def reopened(folder: Path, spool: Spool) -> Spool:
    spool.close()
    return Spool.open(folder, segment_bytes=200)


def test_records_come_back_in_order_over_many_segments(folder: Path, spool: Spool) -> None:
    records = [f"record {number}".encode() for number in range(100)]
    for record in records:
        spool.append([record])
    assert len(list(folder.glob("*.seg"))) > 5
    assert everything(spool) == records
    again = reopened(folder, spool)
    assert everything(again) == records
    again.close()


def test_what_was_acknowledged_is_forgotten_and_its_segments_removed(
    folder: Path, spool: Spool
) -> None:
    for number in range(100):
        spool.append([f"record {number}".encode()])
    at = spool.acked
    for _ in range(20):
        _, at = spool.read(at, 3)
    spool.acknowledge(at)
    rest = everything(spool)
    assert rest[-1] == b"record 99"
    assert 0 < len(rest) < 100
    assert min(int(path.stem) for path in folder.glob("*.seg")) == at.segment
    again = reopened(folder, spool)
    assert everything(again) == rest
    again.close()


def test_an_empty_spool_takes_no_more_disk_than_a_segment(folder: Path, spool: Spool) -> None:
    for _ in range(50):
        spool.append([b"x" * 90])
        spool.acknowledge(spool.end)
        assert spool.pending_bytes == 0
    assert sum(path.stat().st_size for path in folder.glob("*.seg")) <= 400


@given(cut=st.integers(0, 10_000))
def test_a_tail_torn_at_any_byte_loses_only_what_was_not_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    with unsynced():
        folder = tmp_path_factory.mktemp("torn")
        spool = Spool.open(folder)
        records = [f"record {number}".encode() * (1 + number % 5) for number in range(12)]
        ends = []
        for record in records:
            spool.append([record])
            ends.append(spool.end.offset)
        spool.close()
        size = cut % (ends[-1] + 1)
        os.truncate(folder / "0000000001.seg", size)

        again = Spool.open(folder)
        whole = [record for record, end in zip(records, ends, strict=True) if end <= size]
        assert everything(again) == whole
        again.append([b"and on it goes"])
        assert everything(again) == [*whole, b"and on it goes"]
        again.close()


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_never_becomes_a_record(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    with unsynced():
        folder = tmp_path_factory.mktemp("flipped")
        spool = Spool.open(folder)
        records = [f"record {number}".encode() for number in range(10)]
        spool.append(records)
        spool.close()
        path = folder / "0000000001.seg"
        data = bytearray(path.read_bytes())
        data[at % len(data)] ^= flip
        path.write_bytes(data)

        again = Spool.open(folder)
        found = everything(again)
        assert found == records[: len(found)]
        assert len(found) < len(records)
        again.close()


def test_damage_in_the_middle_is_kept_aside_and_said(
    folder: Path, spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    spool.append([b"first", b"second", b"third"])
    path = folder / "0000000001.seg"
    data = bytearray(path.read_bytes())
    data[data.index(b"second")] ^= 1
    path.write_bytes(data)
    again = reopened(folder, spool)
    assert everything(again) == [b"first"]
    assert b"third" in path.with_suffix(".damaged").read_bytes()
    assert "spool_damaged" in caplog.text
    again.close()


def test_a_full_spool_refuses_and_keeps_what_it_has(folder: Path) -> None:
    spool = Spool.open(folder, max_bytes=300)
    spool.append([b"x" * 100, b"y" * 100])
    with pytest.raises(SpoolFullError, match=r"216 of 300 bytes wait .* raise spool_max_bytes"):
        spool.append([b"z" * 100])
    assert everything(spool) == [b"x" * 100, b"y" * 100]
    spool.acknowledge(spool.end)
    spool.append([b"z" * 100])
    assert everything(spool) == [b"z" * 100]
    spool.close()


@pytest.mark.parametrize("written", [0, 5])
def test_a_full_disk_refuses_the_fact_and_the_spool_goes_on(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    spool.append([b"before"])

    def full(fd: int, data: bytes, offset: int) -> None:
        os.pwrite(fd, bytes(data)[:written], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool_module, "_write_all", full)
        with pytest.raises(SpoolWriteError, match="No space left on device. Free space there"):
            spool.append([b"lost"])
    spool.append([b"after"])
    assert everything(spool) == [b"before", b"after"]


def test_a_disk_that_the_kernel_says_is_full(tmp_path: Path) -> None:
    """In a process with a limit on writes: the refusal is the kernel's own."""
    code = f"""
import resource
from pathlib import Path
from everstep.bus.errors import SpoolWriteError
from everstep.bus.facts.spool import Spool
spool = Spool.open(Path({str(tmp_path / "spool")!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
spool.append([b"x" * 900])
try:
    spool.append([b"y" * 900])
except SpoolWriteError as error:
    print(error)
spool.append([b"z" * 50])
print(*(len(record) for record in spool.read(spool.acked, 10)[0]))
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    ).stdout.splitlines()
    assert "File too large. Free space there" in said[0]
    assert said[1] == "900 50"


def test_two_processes_cannot_share_a_spool(folder: Path, spool: Spool) -> None:
    with pytest.raises(SpoolBusyError, match=f"in use by process {os.getpid()}"):
        Spool.open(folder)


def test_a_broken_note_of_what_was_acknowledged_sends_again_rather_than_loses(
    folder: Path, spool: Spool
) -> None:
    spool.append([b"one", b"two"])
    _, at = spool.read(spool.acked, 1)
    spool.acknowledge(at)
    (folder / "acked").write_bytes(b"rubbish that is no position")
    again = reopened(folder, spool)
    assert everything(again) == [b"one", b"two"]
    again.close()


def test_a_note_beyond_the_end_is_not_believed(folder: Path, spool: Spool) -> None:
    spool.append([b"one"])
    body = (1).to_bytes(8, "little") + (99_999).to_bytes(8, "little")
    (folder / "acked").write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
    again = reopened(folder, spool)
    assert everything(again) == [b"one"]
    again.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SpoolWriteError, match=r"the spool .*/file/spool cannot be used"):
        Spool.open(tmp_path / "file" / "spool")


def test_a_record_longer_than_one_read_comes_back_whole(folder: Path) -> None:
    spool = Spool.open(folder)
    long = os.urandom(3 << 20)
    spool.append([b"short", long, b"short again"])
    assert everything(spool) == [b"short", long, b"short again"]
    spool.close()


def test_a_segment_that_cannot_be_begun_ends_nothing(folder: Path, spool: Spool) -> None:
    spool.append([b"1" * 300])
    in_the_way = folder / "0000000002.seg"
    in_the_way.mkdir()
    for _ in range(2):
        with pytest.raises(SpoolWriteError, match="cannot be written: Is a directory"):
            spool.append([b"2"])
    assert everything(spool) == [b"1" * 300]
    in_the_way.rmdir()
    spool.append([b"3"])
    assert everything(spool) == [b"1" * 300, b"3"]
