"""`async_save`, called as `torch.save` is: from several threads, and in forks."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stopping import stop
from tests.waiting import until
from trainer_sdk.checkpoint import FileSaver, SaveError, async_save, file_saver, wait_for_files
from trainer_sdk.checkpoint.save.buffers import Arena, Buffer
from trainer_sdk.checkpoint.save.request import Timeouts


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A queue of this test's."""
    monkeypatch.setattr(file_saver, "_own", None)
    yield
    if file_saver._own is not None:
        file_saver._own.close()


AT_EXIT = """
import atexit, os, sys
@atexit.register
def save():
    async_save({"a": torch.full((1000,), 1.0)}, sys.argv[1])
    print(os.path.exists(sys.argv[1]))
import torch
from trainer_sdk.checkpoint import async_save
if len(sys.argv) > 2:
    async_save({}, sys.argv[2])
"""


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1000,), value)}


def is_saved(path: Path, value: float) -> bool:
    return torch.equal(torch.load(path, weights_only=True)["a"], state(value)["a"])


def test_a_file_that_fails_after_the_close_raises(tmp_path: Path) -> None:
    """`schedule` waits for it then, as `close` would."""
    files = FileSaver(on_error="retry")
    files.close()
    with pytest.raises(SaveError, match="there is no folder"):
        files.schedule(state(1), tmp_path / "none" / "a.pt")


class Door:
    """Let one thread in at a time, and count those that have found it shut."""

    def __init__(self) -> None:
        self.waited = 0
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waited += 1
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_threads_that_save_at_once_have_each_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, plain = Door(), Arena.next

    def slowly(self: Arena) -> Buffer | None:
        until(lambda: door.waited, "the other one waits")
        return plain(self)

    monkeypatch.setattr(file_saver, "_opening", door)
    monkeypatch.setattr(Arena, "next", slowly)
    paths = [tmp_path / "1.pt", tmp_path / "2.pt"]
    threads = [
        threading.Thread(target=async_save, args=(state(value), path))
        for value, path in enumerate(paths)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    wait_for_files(40)
    assert [is_saved(path, value) for value, path in enumerate(paths)] == [True, True]


def test_what_a_writer_has_left_that_was_killed_goes_with_the_next_file(tmp_path: Path) -> None:
    end = ".everstep-saving"
    left, others, own = (tmp_path / f"{one}{end}" for one in (".old.pt.1", ".new.pt.2", "mine"))
    for path in (left, others, own):
        path.write_bytes(bytes(100))
        os.utime(path, (0, 0))
    elsewhere = tmp_path / f".theirs.pt.3{end}"  # its lock may be on another node, and not be seen
    elsewhere.touch()
    with others.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a writer does that lives
        async_save(state(1), tmp_path / "new.pt")
        wait_for_files(40)
    assert sorted(tmp_path.iterdir()) == [others, elsewhere, own, tmp_path / "new.pt"]
    assert is_saved(tmp_path / "new.pt", 1)


def test_a_fork_has_memory_of_its_own(tmp_path: Path) -> None:
    async_save(state(0), tmp_path / "before.pt")
    wait_for_files(40)
    assert file_saver._own is not None
    writer = file_saver._own._queue.writer_pid
    assert writer is not None
    stop(writer)
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        os.read(receive, 1)
        async_save(state(2), tmp_path / "child.pt")
        wait_for_files(40)
        os._exit(0)
    async_save(state(1), tmp_path / "parent.pt")
    os.write(send, b".")
    os.waitpid(child, 0)
    os.kill(writer, signal.SIGCONT)
    wait_for_files(40)
    assert is_saved(tmp_path / "parent.pt", 1)
    assert is_saved(tmp_path / "child.pt", 2)


def test_a_folder_that_never_was_is_said_to_be_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "none"
    async_save(state(0), folder / "model.pt")
    wait_for_files(40)
    assert f"there is no folder {folder}: make it, and save again" in capsys.readouterr().err
    folder.mkdir()
    async_save(state(0), folder / "model.pt")
    wait_for_files(40)
    assert is_saved(folder / "model.pt", 0)


@pytest.mark.parametrize("others", [(), ("earlier.pt",)], ids=["alone", "after others"])
def test_an_exit_handler_waits_for_its_file(tmp_path: Path, others: tuple[str, ...]) -> None:
    """Those that came before it wait for nothing more: it was there before they were."""
    command = [sys.executable, "-c", AT_EXIT, "last.pt", *others]
    is_there = subprocess.check_output(command, cwd=tmp_path, text=True, timeout=50)
    assert is_there == "True\n"
    assert is_saved(tmp_path / "last.pt", 1)


def test_after_close_a_file_is_waited_for_and_nothing_stays(tmp_path: Path) -> None:
    saves = file_saver.FileSaver()
    for value in range(3):
        saves.schedule(state(value), tmp_path / f"{value}.pt")
        saves.close()
    saves.schedule(state(3), tmp_path / "3.pt")
    assert [is_saved(tmp_path / f"{value}.pt", value) for value in range(4)] == [True] * 4
    assert saves._queue.writer_pid is None
    assert not any(one.size for one in saves._arena.buffers)


def test_a_name_may_be_as_long_as_names_are(tmp_path: Path) -> None:
    path = tmp_path / ("\N{OLD PERSIAN SIGN A}" * 62 + "model.pt"[:7])
    assert len(os.fsencode(path.name)) == 255
    async_save(state(1), path)
    wait_for_files(40)
    assert is_saved(path, 1)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_signal_handler_that_interrupts_a_save_does_not_wait_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_closed: bool,
) -> None:
    plain, got, save = file_saver.TorchFile.fill, [], async_save
    if is_closed:
        saves = file_saver.FileSaver(timeouts=Timeouts(exit_within_s=40))
        saves.close()
        save = saves.schedule

    def fill(*what: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        plain(*what)

    def save_too(*_: object) -> None:
        got.append(save(state(2), tmp_path / "handler.pt"))

    before = signal.signal(signal.SIGUSR1, save_too)
    monkeypatch.setattr(file_saver.TorchFile, "fill", fill)
    try:
        save(state(1), tmp_path / "model.pt")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [one.state for one in got] == ["failed"]
    assert "handler.pt: it interrupts another save" in capsys.readouterr().err
    wait_for_files(40)
    assert is_saved(tmp_path / "model.pt", 1)
