"""The writer begins while the state is still being copied; what goes wrong meanwhile."""

import math
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import Saving, load, path_of, same, saving
from tests.stopping import stop
from tests.waiting import until
from trainer_sdk.checkpoint.save import saver, staging
from trainer_sdk.checkpoint.save.request import OnError
from trainer_sdk.checkpoint.save.save_queue import SaveQueue

SIZE = 3 << 20
PIECE_BYTES = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


class Halfway:
    """A copy that stops when some of it is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.weight = torch.nn.Parameter(torch.randn(SIZE // 4))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.state = {"weight": self.weight}
        self.expected = {"weight": self.weight.detach().clone()}
        self.go_on = threading.Event()
        self._hidden = folder / "root" / ".saving"
        plain = staging._copy_in_background

        def copy_beside(one: staging.TensorCopy) -> None:
            if one.begin > PIECE_BYTES:
                self.go_on.wait(30)
            plain(one)

        monkeypatch.setattr(staging, "_PIECE_BYTES", PIECE_BYTES)
        monkeypatch.setattr(staging, "_copy_in_background", copy_beside)

    def begin(self, rank: Saving, step: int) -> None:
        """Until it has stopped, and the writer has a file for it."""
        self.begin_in_vain(rank, step)
        until(lambda: list(self._hidden.glob(f"{step}-*/.*")), "the writer has begun")

    def begin_in_vain(self, rank: Saving, step: int) -> None:
        rank.queue.warm()
        assert rank.save(step, self.state) is not None

    def finish(self, rank: Saving) -> list[int]:
        self.go_on.set()
        rank.saver.settle()
        return rank.finish()

    def saves_next(self, rank: Saving, step: int) -> None:
        assert rank.save(step, self.state) is not None
        assert self.finish(rank) == [step]

    def is_saved(self, folder: Path, step: int) -> bool:
        return same(load(folder, step, {"weight": torch.zeros(SIZE // 4)}), self.expected)


@pytest.fixture
def halfway(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Halfway]:
    made = Halfway(monkeypatch, folder)
    yield made
    made.go_on.set()


def test_what_the_writer_has_begun_early_is_what_was_there(folder: Path, halfway: Halfway) -> None:
    with saving(folder, optimizers=(halfway.optimizer,)) as rank:
        halfway.begin(rank, 1)
        assert not path_of(folder, 1).exists()
        assert halfway.finish(rank) == [1]
        (written,) = rank.events("part_written")
        assert written["stall_s"] > 0
    assert halfway.is_saved(folder, 1)


@pytest.mark.parametrize("on_error", ["warn", "retry"])
def test_a_writer_that_dies_while_the_state_is_copied(
    folder: Path, halfway: Halfway, on_error: OnError
) -> None:
    with saving(folder, on_error=on_error, optimizers=(halfway.optimizer,)) as rank:
        halfway.begin(rank, 1)
        os.kill(rank.writer, signal.SIGKILL)
        until(lambda: rank.events("failed"), "word of its end")
        assert halfway.finish(rank) == ([1] if on_error == "retry" else [])
        assert [one["error"] for one in rank.events("failed")] == ["writer_died"]
        halfway.saves_next(rank, 2)
    assert path_of(folder, 1).exists() is (on_error == "retry")
    assert halfway.is_saved(folder, 2)


@pytest.mark.parametrize("on_error", ["warn", "retry"])
def test_a_writer_that_fails_while_the_state_is_copied(
    folder: Path, halfway: Halfway, on_error: OnError
) -> None:
    """What is tried again is tried once it is whole, however long its copy takes."""
    with saving(folder, on_error=on_error, optimizers=(halfway.optimizer,)) as rank:
        (folder / "root").write_text("in the way of the folder")
        halfway.begin_in_vain(rank, 1)
        until(lambda: rank.events("failed"), "word of it")
        (save,) = rank.queue._saves.values()
        assert save.retry_at == (math.inf if on_error == "retry" else None)
        (folder / "root").unlink()
        assert halfway.finish(rank) == ([1] if on_error == "retry" else [])
        assert len(rank.events("failed")) == 1
        halfway.saves_next(rank, 2)
    assert halfway.is_saved(folder, 2)


def test_a_state_that_changes_meanwhile_is_given_up(folder: Path, halfway: Halfway) -> None:
    with saving(folder, on_error="retry", optimizers=(halfway.optimizer,)) as rank:
        halfway.begin(rank, 1)
        writer = rank.queue.writer_pid
        halfway.weight.data.add_(1)
        assert halfway.finish(rank) == []
        assert [one["error"] for one in rank.events("failed")] == ["changed"]
        until(lambda: not list((folder / "root" / ".saving").glob("*")), "nothing half")
        halfway.expected = {"weight": halfway.weight.detach().clone()}
        halfway.saves_next(rank, 2)
        assert rank.queue.writer_pid == writer
    assert not path_of(folder, 1).exists()
    assert halfway.is_saved(folder, 2)


def test_a_save_that_is_abandoned_meanwhile_leaves_nothing_to_be_seen(
    folder: Path, halfway: Halfway
) -> None:
    with saving(folder, optimizers=(halfway.optimizer,)) as rank:
        halfway.begin(rank, 1)
        rank.queue.close(abort=True)
        halfway.go_on.set()
        rank.saver.settle()
    assert not path_of(folder, 1).exists()


def test_a_save_that_is_given_up_is_not_sent_ahead(folder: Path, halfway: Halfway) -> None:
    with saving(folder, optimizers=(halfway.optimizer,)) as rank:
        halfway.begin(rank, 1)
        (save,) = rank.queue._saves.values()
        order = save.order
        assert order is not None
        rank.queue.fail_late(save, 0.0)
        rank.queue.send_ahead(save, order)  # type: ignore[arg-type]
        assert halfway.finish(rank) == []
        until(lambda: not list((folder / "root" / ".saving").glob("1-*/.*")), "it has let go")


Words = list[tuple[str, int]]


def said(monkeypatch: pytest.MonkeyPatch) -> Words:
    """What a rank says to its writer of what it copies."""
    words: Words = []
    send_ahead, filled = SaveQueue.send_ahead, SaveQueue.filled

    def say_ahead(self: SaveQueue, save: Any, order: Any) -> None:
        words.append(("ahead", order.file_bytes))
        send_ahead(self, save, order)

    def say_filled(self: SaveQueue, save: Any, end: int) -> None:
        words.append(("filled", end))
        filled(self, save, end)

    monkeypatch.setattr(SaveQueue, "send_ahead", say_ahead)
    monkeypatch.setattr(SaveQueue, "filled", say_filled)
    return words


def test_a_training_that_waits_has_copied_most_before_the_writer_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_PIECE_BYTES", PIECE_BYTES)
    state = {"a": torch.randn(SIZE // 8), "b": torch.randn(3 * SIZE // 8)}
    words = said(monkeypatch)
    with saving(folder, is_lazy=False) as rank:
        rank.queue.warm()
        rank.save(1, state)
        assert rank.finish() == [1]
    (ahead,) = [end for what, end in words if what == "ahead"]
    ends = [end for what, end in words if what == "filled"]
    assert words[0][0] == "ahead"
    assert saver._ALONE * ahead <= ends[0] < ends[-1] < ahead
    blank = {key: torch.zeros_like(value) for key, value in state.items()}
    assert same(load(folder, 1, blank), state)


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_writer_that_takes_no_word_holds_up_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_lazy: bool
) -> None:
    """However many tensors there are: what its socket cannot hold would be waited for."""
    weights = [torch.nn.Parameter(torch.randn(9000)) for _ in range(900)]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    state = {"weights": {str(number): one for number, one in enumerate(weights)}}
    words = said(monkeypatch)
    with saving(folder, is_lazy=is_lazy, optimizers=(optimizer,)) as rank:
        rank.queue.warm()
        writer = rank.writer
        rank.save(1, state)
        rank.saver.settle()
        assert rank.finish() == [1]
        assert 1 < len(words) < 80
        stop(writer)
        rank.save(2, state)
        rank.saver.settle()
        os.kill(writer, signal.SIGCONT)
        assert rank.finish() == [2]


def test_what_stays_in_memory_waits_for_all_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = said(monkeypatch)
    with saving(folder, keeps=True, is_lazy=False) as rank:
        rank.queue.warm()
        rank.save(1, {"a": torch.randn(SIZE // 4)}, to_root=False)
        assert rank.finish() == [1]
    assert words == []
