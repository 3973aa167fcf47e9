"""A root that hangs has a few threads and a pause; other roots notice nothing (B3)."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep_services.catalog import storage_threads
from everstep_services.catalog.storage_threads import OutOfReachError, StorageThreads
from tests.waiting import WITHIN_S, until_async
from trainer_sdk.checkpoint.storage.folder import Folder


class Hung(Folder):
    """A folder whose server does not answer."""

    def __init__(self, path: str, answers: threading.Event) -> None:
        super().__init__(path)
        self.answers = answers

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self.answers.wait()
        return super().read(name, start, length)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[threading.Event]:
    """All roots that are called hung… hang until the event is set."""
    answers = threading.Event()
    for name in ("hung", "hung-too", "good"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"data")

    def opened(root: str) -> Folder:
        return Hung(root, answers) if Path(root).name.startswith("hung") else Folder(root)

    monkeypatch.setattr(storage_threads, "storage_for", opened)
    monkeypatch.setattr(storage_threads, "SILENT_AFTER_S", 0.0)
    yield answers
    answers.set()


def read(storage: Any, progress: object) -> bytes:
    del progress
    return storage.read("file")  # type: ignore[no-any-return]


def running(threads: StorageThreads) -> float:
    return threads.statistics()["storage_threads"]


async def ended(threads: StorageThreads) -> bool:
    return threads.statistics() == {"roots_hung": 0.0, "storage_threads": 0.0}


async def test_a_root_that_hangs_is_named_once_and_has_few_threads(
    server: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = StorageThreads(hangs_after_s=0.02)
    caplog.set_level(logging.INFO)
    for _ in range(30):
        with pytest.raises(OutOfReachError, match="hung has not answered for .* asks it again"):
            await threads.run(str(tmp_path / "hung"), read)
    assert threads.statistics() == {"roots_hung": 1.0, "storage_threads": 1.0}
    assert [r.message for r in caplog.records if "storage_hangs" in r.message] == [
        f"storage_hangs root={tmp_path / 'hung'} silent_s=0"
    ]
    server.set()
    await until_async(lambda: ended(threads), "its thread ends", holds=bool)
    assert await threads.run(str(tmp_path / "hung"), read) == b"data"
    assert f"storage_answers root={tmp_path / 'hung'}" in caplog.messages


@pytest.mark.usefixtures("server")
async def test_other_roots_are_read_meanwhile(tmp_path: Path) -> None:
    threads = StorageThreads()
    waiting = asyncio.create_task(threads.run(str(tmp_path / "hung"), read))
    for _ in range(30):
        assert await threads.run(str(tmp_path / "good"), read) == b"data"
    assert threads.is_silent(str(tmp_path / "hung"))
    assert not waiting.done()
    waiting.cancel()


async def test_a_root_that_hangs_is_asked_again_after_longer_and_longer_pauses(
    server: threading.Event, tmp_path: Path
) -> None:
    del server
    threads = StorageThreads(hangs_after_s=0.01, pause_s=0.0)
    for _ in range(20):
        for name in ("hung", "hung-too"):
            with pytest.raises(OutOfReachError, match="has not answered"):
                await threads.run(str(tmp_path / name), read)
    assert running(threads) == 2 * storage_threads._MOST_SILENT
    pauses = []
    state = storage_threads._Root(storage_threads.PAUSE_S)
    for _ in range(9):
        pauses.append(state.pause_s)
        threads._hangs("x", state, storage_threads.StorageProgress())
    assert pauses == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]


async def test_callers_who_give_up_leave_few_threads(
    server: threading.Event, tmp_path: Path
) -> None:
    """A list of checkpoints waits for a second only."""
    del server
    threads = StorageThreads()
    for _ in range(10):
        with pytest.raises((TimeoutError, OutOfReachError)):
            async with asyncio.timeout(0.01):
                await threads.run(str(tmp_path / "hung"), read)
    assert running(threads) == 1


async def test_slow_work_that_moves_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"data")
    threads, time_s, watcher = StorageThreads(hangs_after_s=0.1), 0.0, threading.get_ident()
    looked = threading.Event()

    def monotonic() -> float:
        if threading.get_ident() == watcher:
            looked.set()
        return time_s

    def passes(seconds: float) -> None:
        nonlocal time_s
        time_s += seconds
        looked.clear()
        assert looked.wait(WITHIN_S)  # the watcher sees how long it has been silent

    def work(storage: Any, progress: storage_threads.StorageProgress) -> int:
        for _ in range(6):
            passes(0.06)
            storage.read("file")
        progress.pause()
        passes(2.5)
        progress.move()
        return 7

    monkeypatch.setattr(storage_threads, "time", SimpleNamespace(monotonic=monotonic))
    assert await threads.run(str(tmp_path), work) == 7


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_threads, "_MOST_OF_ROOT", 2)


@pytest.mark.usefixtures("many")
async def test_the_threads_of_a_root_that_answers_are_limited_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    threads, most = StorageThreads(), 0
    lock = threading.Lock()

    def work(storage: Any, progress: object) -> bytes:
        nonlocal most
        with lock:
            most = max(most, int(threads.statistics()["storage_threads"]))
        return read(storage, progress)

    runs: list[Callable[[], Any]] = [lambda: threads.run(str(tmp_path), work)] * 20
    assert await asyncio.gather(*(run() for run in runs)) == [b"data"] * 20
    assert most <= 2
