"""What `save` returns: what has become of the save, and a wait until it can be restored (E7)."""

import itertools
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_sdk
from tests.checkpoint_helpers.saved_by import WITHIN_S, Saving, path_of, saving
from tests.stopping import stop
from tests.unit.trainer_sdk.checkpoint.saved_states import together
from tests.waiting import until
from trainer_sdk import testing
from trainer_sdk.checkpoint import Checkpointer, SaveError, SaveHandle
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.save.request import NotBegun

STATE: dict[str, Any] = {"a": torch.arange(1 << 16)}
JOB = "handles"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


def stopped_writer(saves: Checkpointer) -> int:
    """The writer's process, which takes no order any more."""
    pid = until(lambda: saves._queue.writer_pid, "a writer")
    stop(pid)
    return pid


class GoesOn:
    """Lets a stopped writer go on once somebody waits for its saves."""

    def __init__(self, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pid = pid
        wait = SaveHandle.wait

        def watched(handle: SaveHandle, timeout_s: float | None = None) -> bool:
            assert handle.state == "staged"
            self.threads.append(threading.Timer(0.0, os.kill, (self._pid, signal.SIGCONT)))
            self.threads[-1].start()
            return wait(handle, timeout_s)

        self.threads: list[threading.Timer] = []
        monkeypatch.setattr(SaveHandle, "wait", watched)


def test_a_synchronous_save_returns_when_it_can_be_restored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the writer, which is stopped here, has written nothing."""
    called: list[str] = []
    with Checkpointer(folder / "root", job=JOB) as saves:
        pid = stopped_writer(saves)
        GoesOn(pid, monkeypatch)
        handle = saves.save(1, STATE, wait=True, finalize=(lambda: called.append("durable"),))
        assert path_of(folder, 1).exists()
        assert (handle.state, handle.durable, handle.step, handle.number) == (
            "committed",
            True,
            1,
            1,
        )
        assert called == ["durable"]
        assert saves.unfinished == 0


def test_a_preempted_training_has_saved_when_its_step_returns(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with testing.watched() as watch, Checkpointer(folder / "root", job=JOB) as saves:
        GoesOn(stopped_writer(saves), monkeypatch)
        trainer_sdk.session().step()
        watch.ask_to_stop()
        handle = saves.step(1, STATE)
        assert handle is not None
        assert handle.durable
        assert path_of(folder, 1).exists()
        assert "save" in watch.sections, "a rank that waits for a save has not stalled"


def test_each_state_of_a_save_is_told_apart(folder: Path) -> None:
    with Checkpointer(folder / "root", job=JOB) as saves:
        pid = stopped_writer(saves)
        first, second = saves.save(1, STATE), saves.save(2, STATE)
        assert (first.state, bool(first), first.error) == ("staged", True, None)
        assert first.wait(timeout_s=0.01) is False
        assert (second.state, bool(second), second.number) == ("skipped", False, 0)
        assert second.reason == "the save of step 1 is not durable yet"
        assert second.wait() is False, "nobody would end it"
        os.kill(pid, signal.SIGCONT)
        assert first.wait(WITHIN_S)
        assert (first.state, first.reason) == ("committed", "")
        (folder / "root" / "step-000000003").write_text("in the way")
        third = saves.save(3, STATE)
        assert third.wait(WITHIN_S) is False
        assert third.state == "failed"
        assert isinstance(third.error, SaveError)
        assert repr(third).startswith("<SaveHandle step 3: failed, '")
    late = saves.save(4, STATE)
    assert (late.state, bool(late)) == ("failed", False)
    assert "is closed" in late.reason
    assert late.error is not None


def test_nothing_was_due_is_no_handle(folder: Path) -> None:
    with Checkpointer(folder / "root", every=2, job=JOB) as saves:
        assert saves.step(1, STATE) is None
        second = saves.step(2, STATE)
        assert second is not None
        assert second.step == 2
        assert saves.save_last(2, STATE) is second, "it was begun already"
        last = saves.save_last(3, STATE)
        assert last.number == 2
    assert last.durable, "the end of `with` waits"
    with Checkpointer(folder / "root", job=JOB) as saves:
        state = {"a": torch.zeros_like(STATE["a"])}
        assert saves.restore(state) is not None
        assert saves.save_last(3, state).state == "skipped"


def test_always_begins_a_save_only_when_the_last_one_is_durable(folder: Path) -> None:
    begun: list[SaveHandle] = []
    with Checkpointer(folder / "root", every="always", max_overhead=1.0, job=JOB) as saves:
        for step in itertools.count(1):
            handle = saves.step(step, STATE)
            if handle is not None:
                assert all(earlier.durable for earlier in begun), "two saves at once"
                begun.append(handle)
            if len(begun) == 4:
                break
    assert [handle.state for handle in begun] == ["committed"] * 4


def test_a_synchronous_save_that_fails_raises_where_that_is_the_policy(folder: Path) -> None:
    (folder / "root").write_text("no folder")
    saves = Checkpointer(folder / "root", job=JOB, on_error="fatal")
    with pytest.raises(SaveError, match="step 1"):
        saves.save(1, STATE, wait=True)
    saves.close()


def test_a_rank_waits_for_the_parts_of_all_others(folder: Path) -> None:
    """This rank's part is durable before the checkpoint can be restored."""
    written = threading.Event()

    def one(group: RankGroup) -> list[str]:
        with saving(folder, group) as rank:
            rank.queue.warm()
            pid = rank.writer
            if group.rank:
                stop(pid)
            handle = handle_of(rank)
            if group.rank:
                assert written.wait(WITHIN_S)
                before = handle.state
                os.kill(pid, signal.SIGCONT)
            else:
                before = until(lambda: handle.state, "its part", holds=lambda it: it == "written")
                assert not handle.durable
                assert not path_of(folder, 1).exists()
                written.set()
            assert handle.wait(WITHIN_S)
            assert path_of(folder, 1).exists()
            rank.finish()
            return [before, handle.state]

    assert together(2, one) == [["written", "committed"], ["staged", "committed"]]


def handle_of(rank: Saving) -> SaveHandle:
    save = rank.save(1, STATE | {f"rank-{rank.queue._rank}": torch.ones(3)})
    return SaveHandle(save or NotBegun(1, "it was not begun"), rank.queue.hurry)


def test_what_is_kept_in_memory_alone_can_be_waited_for(folder: Path) -> None:
    with testing.watched(), Checkpointer(keep_memory=True, job=f"handles-{os.getpid()}") as saves:
        handle = saves.save(7, STATE, wait=True)
        assert handle.state == "committed"
        assert saves.save_last(8, STATE).state == "skipped"


def test_a_file_is_waited_for_alike(folder: Path) -> None:
    handle = trainer_sdk.checkpoint.async_save(STATE, folder / "a.pt")
    assert handle.wait(WITHIN_S)
    assert handle.step is None
    assert repr(handle) == "<SaveHandle file: committed>"
    assert torch.equal(torch.load(folder / "a.pt")["a"], STATE["a"])
    lost = trainer_sdk.checkpoint.async_save(STATE, folder / "none" / "a.pt")
    assert not lost.wait(WITHIN_S)
    assert "there is no folder" in lost.reason


def test_a_forked_child_does_not_wait_for_its_parents_save(folder: Path) -> None:
    with Checkpointer(folder / "root", job=JOB) as saves:
        pid = stopped_writer(saves)
        handle = saves.save(1, STATE)
        child = os.fork()
        if not child:
            os._exit(7 if handle.wait() is False else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_first_save_finds_its_memory_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Made by the training's own thread, it costs half a second a GiB."""
    makers: list[str] = []
    fallocate = os.posix_fallocate

    def noted(*where: int) -> None:
        makers.append(threading.current_thread().name)
        fallocate(*where)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    weights = torch.nn.Parameter(torch.ones(1 << 16))
    optimizer = torch.optim.Adam([weights])
    state: dict[str, Any] = {"weights": weights, "optimizer": optimizer}
    how: dict[str, Any] = {"job": f"handles-{os.getpid()}", "keep_memory": keeps}
    with Checkpointer(folder / "root", every=2, **how) as saves:
        assert saves.restore(state) is None, "then nobody knows yet what the optimizer has"
        weights.grad = torch.ones_like(weights)
        optimizer.step()
        assert saves.step(1, state) is None
        until(lambda: saves._saver._preparation._making, "the making").join(WITHIN_S)
        first = saves.step(2, state)
        assert first is not None
        assert first.wait(WITHIN_S)
    assert set(makers) == {"everstep-memory"}
