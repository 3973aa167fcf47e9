"""Which bytes of a state may be written while it is still being copied."""

import mmap
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from tests.waiting import until
from trainer_sdk.checkpoint.manifest import Identity
from trainer_sdk.checkpoint.storage.names import SAVING
from trainer_sdk.checkpoint.writer import disk, files
from trainer_sdk.checkpoint.writer.disk import GivenUpByRankError, StreamHash, WriteGate
from trainer_sdk.checkpoint.writer.files import part_of, place_of, write_shard
from trainer_sdk.checkpoint.writer.protocol import (
    BufferFilled,
    FromWriter,
    GiveUpSave,
    SaveFailed,
    WriteState,
)
from trainer_sdk.checkpoint.writer.service import WriterService

PAGE = mmap.PAGESIZE
PAGES = 8
SHARD = "__0_0.distcp"


@pytest.fixture
def parallel() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (disk, files):
        monkeypatch.setattr(module, "CHUNK_BYTES", PAGE)
    monkeypatch.setattr(disk, "_MOST_CHUNK_BYTES", PAGE)


def order(root: str, image: str = "", ranks: int = 1) -> WriteState:
    return WriteState(
        save=1,
        image=image,
        is_filling=True,
        identity=Identity(job="j", round=1, step=5, world_size=ranks, layout="l"),
        rank=0,
        file_bytes=PAGES * PAGE,
        image_bytes=PAGES * PAGE,
        metadata=(0, 0),
        entries=(0, 0),
        root=root,
        saving="5-r1-0a-1",
        shard=SHARD,
        within_s=0.0,
    )


def buffer() -> mmap.mmap:
    return mmap.mmap(-1, PAGES * PAGE)


def fill(octets: mmap.mmap, begin: int, end: int) -> None:
    for page in range(begin, end):
        octets[page * PAGE : (page + 1) * PAGE] = bytes([page + 1]) * PAGE


def test_bytes_may_be_written_once_all_bytes_before_their_end_have_arrived(
    parallel: ThreadPoolExecutor,
) -> None:
    gate, come = WriteGate(0), [0]

    def seen_after(begin: int, end: int) -> int:
        gate.let(begin, end)
        return come[0]

    first, second = parallel.submit(seen_after, 0, 10), parallel.submit(seen_after, 10, 20)
    come[0] = 10
    gate.arrived(10, 0.0)
    assert first.result(30) >= 10
    come[0] = 20
    gate.arrived(20, 0.25)
    assert second.result(30) == 20
    assert gate.stall_s == 0.25


def test_a_wait_for_bytes_that_never_arrive_ends_with_an_error(
    parallel: ThreadPoolExecutor,
) -> None:
    gate = WriteGate(10)
    waiting = parallel.submit(gate.wait_for, 11)
    gate.give_up()
    with pytest.raises(GivenUpByRankError):
        waiting.result(30)
    gate.wait_for(10)


def test_arriving_bytes_are_throttled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waits = WriteGate(20_000, bytes_per_s=1), list[float]()
    assert gate.is_throttled
    monkeypatch.setattr(gate._throttle._lifted, "wait", waits.append)
    gate.let(0, 10)
    gate.let(10_000, 20_000)
    assert waits == [0.0, pytest.approx(10_000, abs=300)]
    gate.hurry()
    gate.let(20_000, 20_000)
    assert len(waits) == 2
    assert not gate.is_throttled


def test_the_hash_is_reported_once_all_bytes_have_arrived() -> None:
    found: list[str] = []
    hashing = StreamHash(5, lambda hasher: found.append(hasher.hexdigest()))
    hashing.update(b"ab")
    assert not found
    hashing.update(b"cde")
    assert found == [hashing.hexdigest()] == [xxh3_128_hexdigest(b"abcde")]
    StreamHash(0, lambda hasher: found.append(hasher.hexdigest()))
    assert found[1:] == [xxh3_128_hexdigest(b"")], "a rank may have nothing to write"


def begun(
    parallel: ThreadPoolExecutor, root: str, octets: mmap.mmap, gate: WriteGate, ranks: int = 1
) -> tuple[Future[float], StreamHash]:
    hasher = StreamHash(PAGES * PAGE, lambda _: None)
    windows = [memoryview(octets)]
    ordered = order(root, ranks=ranks)
    done = parallel.submit(write_shard, ordered, windows, hasher, gate, lambda: None)
    return done, hasher


def test_a_shard_is_written_while_its_bytes_arrive(
    tmp_path: Path, parallel: ThreadPoolExecutor
) -> None:
    octets, gate = buffer(), WriteGate(0)
    done, hasher = begun(parallel, str(tmp_path), octets, gate)
    fill(octets, 0, 3)
    gate.arrived(3 * PAGE + PAGE // 2, 0.0)
    hidden = tmp_path / SAVING / "5-r1-0a-1" / f".{SHARD}"
    until(
        lambda: hidden.stat().st_size,
        "three pages",
        holds=lambda size: size == 3 * PAGE,
        despite=FileNotFoundError,
    )
    fill(octets, 3, PAGES)
    gate.arrived(PAGES * PAGE, 0.5)
    done.result(30)
    found = hidden.with_name(SHARD).read_bytes()
    assert found == bytes(octets)
    part = part_of(place_of(str(tmp_path), "5-r1-0a-1", 5), 0)
    assert part is not None
    assert part.files[0].hash == hasher.hexdigest() == xxh3_128_hexdigest(found)
    assert part.stall_s == 0.5


def test_an_object_is_uploaded_while_its_bytes_arrive(parallel: ThreadPoolExecutor) -> None:
    root, octets, gate = f"memory://{uuid.uuid4().hex}", buffer(), WriteGate(0)
    done, hasher = begun(parallel, root, octets, gate)
    fill(octets, 0, 3)
    gate.arrived(3 * PAGE, 0.0)
    fill(octets, 3, PAGES)
    assert not done.done()
    gate.arrived(PAGES * PAGE, 0.0)
    done.result(30)
    part = part_of(place_of(root, "5-r1-0a-1", 5), 0)
    assert part is not None
    assert part.files[0].hash == hasher.hexdigest() == xxh3_128_hexdigest(bytes(octets))


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_save_that_is_given_up_leaves_no_files(
    tmp_path: Path, parallel: ThreadPoolExecutor, kind: str
) -> None:
    root = str(tmp_path) if kind == "folder" else f"memory://{uuid.uuid4().hex}"
    octets, gate = buffer(), WriteGate(0)
    done, _ = begun(parallel, root, octets, gate)
    gate.arrived(4 * PAGE, 0.0)
    gate.give_up()
    with pytest.raises(GivenUpByRankError):
        done.result(30)
    place = place_of(root, "5-r1-0a-1", 5)
    assert place.storage.files(place.before) == []


def test_the_folder_of_a_failure_report_is_not_removed(
    tmp_path: Path, parallel: ThreadPoolExecutor
) -> None:
    """With several ranks, another rank may have made the folder and be about to write into it."""
    gate = WriteGate(0)
    done, _ = begun(parallel, str(tmp_path), buffer(), gate, ranks=2)
    gate.give_up()
    with pytest.raises(GivenUpByRankError):
        done.result(30)
    assert list((tmp_path / SAVING).iterdir()) == [tmp_path / SAVING / "5-r1-0a-1"]


class Heard:
    """A writer in this process, and its messages."""

    def __init__(self) -> None:
        self.lines: list[FromWriter] = []
        self.service = WriterService(self._tell)
        self.on: Callable[[FromWriter], None] = lambda _: None

    def _tell(self, line: FromWriter) -> None:
        self.lines.append(line)
        self.on(line)


def image(tmp_path: Path) -> str:
    path = tmp_path / "image"
    path.write_bytes(b"\1" * PAGES * PAGE)
    return str(path)


def test_a_writer_forgets_a_save_that_the_rank_gives_up(tmp_path: Path) -> None:
    heard, root = Heard(), tmp_path / "root"
    heard.service.take(order(str(root), image(tmp_path)))
    until(lambda: list(root.rglob(f".{SHARD}")), "it has begun")
    heard.service.take(GiveUpSave(save=1))
    until(lambda: not heard.service._gates, "nobody works on it")
    assert heard.lines == []
    assert list(root.rglob(f"*{SHARD}")) == []


def test_an_order_may_be_sent_again_right_after_its_failure(tmp_path: Path) -> None:
    """A message for the failed attempt does not affect the next attempt."""
    heard, root = Heard(), tmp_path / "root"
    root.write_text("in the way of the folder")
    again = threading.Event()

    def resend(line: FromWriter) -> None:
        if isinstance(line, SaveFailed) and not again.is_set():
            root.unlink()
            heard.service.take(order(str(root), image(tmp_path)))
            again.set()

    heard.on = resend
    heard.service.take(order(str(root), image(tmp_path)))
    assert again.wait(30)
    until(lambda: list(root.rglob(f".{SHARD}")), "it has begun", despite=FileNotFoundError)
    heard.service.take(BufferFilled(save=1, end=PAGES * PAGE))
    until(lambda: list(root.glob("step-*")), "it is visible")
