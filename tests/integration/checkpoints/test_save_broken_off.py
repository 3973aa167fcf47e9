"""Saves that are broken off on the rank's side, by Ctrl-C or an error: nobody waits for them."""

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import load, path_of, same, saving
from tests.stopping import stop
from tests.waiting import until
from trainer_sdk.checkpoint import FileSaver, SaveError
from trainer_sdk.checkpoint.save import plan, saver, staging
from trainer_sdk.checkpoint.save.request import OnError, Timeouts
from trainer_sdk.checkpoint.save.staging import Stager
from trainer_sdk.checkpoint.writer.protocol import BufferFilled, GiveUpSave, WriteFile

STATE: dict[str, Any] = {"a": torch.arange(1 << 17), "value": {"lr": 0.5}}
BLANK: dict[str, Any] = {"a": torch.zeros(1 << 17, dtype=torch.int64), "value": {"lr": 0}}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def lazy_state() -> tuple[dict[str, Any], torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.randn(1 << 16))
    return {"weight": weight}, torch.optim.SGD([weight], lr=0.1)


@pytest.mark.parametrize("where", ["copy", "order"])
def test_nobody_waits_for_a_save_that_ctrl_c_has_broken_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    state, optimizer = lazy_state()
    with saving(folder, on_error="fatal", optimizers=(optimizer,)) as rank:
        with monkeypatch.context() as patched:
            if where == "order":
                patched.setattr(saver, "saving_name", interrupt)
            else:
                plain = getattr(Stager, where)

                def late(*given: Any) -> None:
                    plain(*given)
                    interrupt()

                _once(patched, Stager, where, late)
            with pytest.raises(KeyboardInterrupt):
                rank.save(1, state)
            rank.saver.settle()
            failure = rank.queue.await_all()
        assert failure is not None
        assert "the save of step 1 failed at copy" in str(failure)
        with pytest.raises(SaveError):
            rank.finish()
        expected = {"weight": state["weight"].detach().clone()}
        assert rank.save(2, state) is not None
        optimizer.zero_grad()
        state["weight"].grad = torch.ones(1 << 16)
        optimizer.step()
        assert rank.finish() == [2]
    assert same(load(folder, 2, {"weight": torch.zeros(1 << 16)}), expected)


def test_ctrl_c_takes_nothing_back_of_which_the_writer_has_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, optimizer = lazy_state()
    go_on = Stager.go_on
    with saving(folder, optimizers=(optimizer,)) as rank:

        def late(self: Stager, one: staging.Staging) -> None:
            go_on(self, one)
            save = rank.queue._saves[1]
            until(lambda: save.is_sent and not save.is_filling, "it is whole")
            raise KeyboardInterrupt

        _once(monkeypatch, Stager, "go_on", late)
        rank.queue.warm()
        writer = rank.queue.writer_pid
        assert writer is not None
        stop(writer)
        with pytest.raises(KeyboardInterrupt):
            rank.save(1, state)
        expected = {"weight": state["weight"].detach().clone()}
        state["weight"].data.fill_(3)
        assert rank.save(2, state) is None, "the writer reads its memory"
        os.kill(writer, signal.SIGCONT)
        assert rank.finish() == [1]
    assert same(load(folder, 1, {"weight": torch.zeros(1 << 16)}), expected)


def test_an_optimizer_in_a_fork_does_not_wait_for_the_copy_of_its_parent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, optimizer = lazy_state()
    may_copy, copy_beside = threading.Event(), staging._copy_in_background

    def copy_late(one: staging.TensorCopy) -> None:
        may_copy.wait(30)
        copy_beside(one)

    monkeypatch.setattr(staging, "_copy_in_background", copy_late)
    with saving(folder, optimizers=(optimizer,)) as rank:
        rank.save(1, state)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            rank.saver.settle()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        may_copy.set()
        assert rank.finish() == [1]


def test_a_save_that_was_broken_off_is_not_copied_into_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy is under way when the next one begins, in the same memory."""
    state, optimizer = lazy_state()
    begun, may_copy = threading.Event(), threading.Event()
    copy_beside, go_on, settle = staging._copy_in_background, Stager.go_on, Stager.settle

    def copy_late(one: staging.TensorCopy) -> None:
        begun.set()
        may_copy.wait(30)
        copy_beside(one)

    def broken_off(self: Stager, one: staging.Staging) -> None:
        go_on(self, one)
        begun.wait(30)
        raise KeyboardInterrupt

    def settle_late(self: Stager) -> None:
        if begun.is_set():
            may_copy.set()
        settle(self)

    with saving(folder, optimizers=(optimizer,)) as rank:
        rank.save(1, state)
        assert rank.finish() == [1]
        with monkeypatch.context() as patched:
            patched.setattr(staging, "_copy_in_background", copy_late)
            patched.setattr(Stager, "settle", settle_late)
            _once(patched, Stager, "go_on", broken_off)
            with pytest.raises(KeyboardInterrupt):
                rank.save(2, state)
            state["weight"].data.fill_(3)
            rank.save(3, state)
            assert rank.finish() == [3]
    found = load(folder, 3, {"weight": torch.zeros(1 << 16)})
    assert same(found, {"weight": torch.full((1 << 16,), 3.0)})


def second_window(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do this when the second window of the first save is filled."""
    plain = plan.fill_window
    seen: list[int] = []

    def fill_window(window: torch.Tensor, at: int, whole: Any) -> None:
        if at and not seen:
            seen.append(at)
            act()
        plain(window, at, whole)

    monkeypatch.setattr(saver, "fill_window", fill_window)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_save_in_waves_that_is_broken_off_lets_the_next_one_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def act() -> None:
        raise error

    second_window(monkeypatch, act)
    with saving(folder, memory_limit=1 << 16) as rank:
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                rank.save(1, STATE)
        else:
            assert rank.save(1, STATE) is not None
        writer = rank.queue.writer_pid
        assert rank.finish() == []
        rank.save(2, STATE)
        assert rank.finish() == [2]
        assert rank.queue.writer_pid == writer
        assert len(rank.events("failed")) == 1
        until(lambda: not list((folder / "root" / ".saving").glob("*")), "nothing half")
    assert same(load(folder, 2, dict(BLANK)), STATE)


def test_a_writer_that_dies_between_waves_takes_no_other_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(folder, memory_limit=1 << 16) as rank:

        def act() -> None:
            os.kill(rank.writer, signal.SIGKILL)
            until(lambda: rank.events("failed"), "word of its end")

        second_window(monkeypatch, act)
        rank.save(1, STATE)
        assert rank.finish() == []
        rank.save(2, STATE)
        assert rank.finish() == [2]
        assert [one["error"] for one in rank.events("failed")] == ["writer_died"]
    assert same(load(folder, 2, dict(BLANK)), STATE)


def test_word_of_a_save_that_is_over_does_no_harm(folder: Path) -> None:
    with saving(folder) as rank:
        rank.queue.warm()
        pid = rank.queue.writer_pid
        rank.queue._ready_writer().send(BufferFilled(save=99, end=1))
        rank.queue._ready_writer().send(GiveUpSave(save=99))
        rank.save(1, STATE)
        assert rank.finish() == [1]
        assert rank.queue.writer_pid == pid


# -- a writer that goes wrong ------------------------------------------------------------------

BREAKS = """
import os
fsync = os.fsync

def broken(descriptor):
    if os.path.exists({marker!r}):
        os.unlink({marker!r})
        {act}
    fsync(descriptor)

os.fsync = broken
"""


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        ("os._exit(17)", "writer_died", "died by exit code 17"),
        ("raise RuntimeError('a bug')", "writer", "RuntimeError: a bug"),
    ],
)
def test_a_writer_that_exits_or_raises_is_told_and_the_next_save_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, act: str, error: str, said: str
) -> None:
    """`os._exit(17)` and an exception in the writer (A8.2)."""
    marker = folder / "break"
    (folder / "sitecustomize.py").write_text(BREAKS.format(marker=str(marker), act=act))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with saving(folder) as rank:
        rank.save(1, STATE)
        assert rank.finish() == [1]
        marker.touch()
        rank.save(2, STATE)
        assert rank.finish() == []
        (failed,) = rank.events("failed")
        assert (failed["error"], failed["step"], failed["last_good_step"]) == (error, 2, 1)
        assert said in rank.told.warned[0]
        rank.save(3, STATE)
        assert rank.finish() == [3]
    assert not path_of(folder, 2).exists()
    assert same(load(folder, 3, dict(BLANK)), STATE)


# -- files ---------------------------------------------------------------------------------------


class Other:
    """Is pickled in one way first, and then in another."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.ways: list[Callable[[], object]] = [lambda: "x" * 5000, then]

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.ways.pop(0)(),)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (lambda: "x" * 99999, "bytes while it was copied"),
        (lambda: "", "bytes while it was copied"),
        (lambda: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_a_file_that_cannot_be_copied_holds_up_no_other(
    folder: Path, capfd: pytest.CaptureFixture[str], then: Callable[[], object], said: str
) -> None:
    files = FileSaver()
    files.schedule(Other(then), folder / "a.pt")
    files.schedule({"a": torch.ones(3)}, folder / "b.pt")
    assert files.maybe_finalize(blocking=True, within_s=40) == [2]
    assert files._queue.await_all() is None
    files.close()
    assert [one.name for one in folder.iterdir()] == ["b.pt"]
    told = capfd.readouterr().err
    assert f"the save of a file failed at copy of {folder}/a.pt" in told
    assert said in told


def test_ctrl_c_while_a_file_is_copied_holds_up_no_other(folder: Path) -> None:
    files = FileSaver(on_error="fatal")
    with pytest.raises(KeyboardInterrupt):
        files.schedule(Other(interrupt), folder / "a.pt")
    assert "KeyboardInterrupt" in str(files._queue.await_all())
    with pytest.raises(SaveError):
        files.maybe_finalize(blocking=True, within_s=40)
    files.schedule({"a": torch.ones(3)}, folder / "b.pt")
    files.close()
    assert [one.name for one in folder.iterdir()] == ["b.pt"]


@pytest.mark.parametrize("on_error", ["warn", "retry", "fatal"])
def test_too_little_memory_for_a_file_is_the_policys(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    on_error: OnError,
) -> None:
    files = FileSaver(on_error=on_error)
    monkeypatch.setattr("trainer_sdk.checkpoint.save.buffers.available_bytes", lambda _: 0)
    if on_error == "fatal":
        with pytest.raises(SaveError, match="has 0 MiB left, and the copy needs 1 MiB"):
            files.schedule([1], folder / "a.pt")
    else:
        assert files.schedule([1], folder / "a.pt").state == "failed"
        assert "or use torch.save" in capfd.readouterr().err
    assert (files._queue.await_all() is None) is (on_error != "retry")
    files.close(abort=True)


def test_who_has_all_the_memory_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = FileSaver(timeouts=Timeouts(write_within_s=0.05))
    buffer = files._arena.next()
    assert buffer is not None
    save = files._queue.begin(None, buffer, (), 0.0)
    save.order = WriteFile(save=save.number, image="", size_bytes=1, path="/slow/a.pt")
    assert files.schedule([1], folder / "b.pt").state == "failed"
    told = capfd.readouterr().err
    assert f"the save of a file failed at memory of {folder}/b.pt" in told
    assert "the files before it (/slow/a.pt) have had all the memory" in told
    assert "in_flight=2" in told
    files.close(abort=True)


def _once(patched: pytest.MonkeyPatch, kind: type, name: str, other: Any) -> None:
    plain = getattr(kind, name)
    seen: list[str] = []

    def act(*given: Any) -> Any:
        if seen:
            return plain(*given)
        seen.append(name)
        return other(*given)

    patched.setattr(kind, name, act)
