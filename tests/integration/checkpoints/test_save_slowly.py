"""Saves that may not write faster than they are allowed, until the training waits for them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint_helpers.saved_by import JOB, WITHIN_S, Saving, load, same, saving
from tests.stopping import stop
from tests.waiting import until
from trainer_sdk.checkpoint import Checkpointer, checkpointer
from trainer_sdk.checkpoint.save import saver
from trainer_sdk.checkpoint.writer.protocol import WriteState

MIB = 1 << 20
STATE = {"a": torch.arange(10 * MIB, dtype=torch.int32)}  # 40 MiB: three chunks
NEVER = 1
"""A byte a second: what is asked to hurry is all that will be written."""


def blank() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros_like(STATE["a"])}


def test_it_takes_as_long_as_it_may_not_be_faster(tmp_path: Path) -> None:
    with saving(tmp_path, write_bytes_per_s=64 * MIB) as rank:
        began = time.monotonic()
        rank.save(1, STATE)
        until(rank.queue.maybe_finalize, "it is durable", within_s=WITHIN_S)
        assert time.monotonic() - began >= 0.5, "its last chunk begins after 32 MiB"
    assert same(load(tmp_path, 1, blank()), STATE)


def finish(rank: Saving) -> object:
    return rank.finish()


def save_at_once(rank: Saving) -> object:
    """The memory of the one before is needed for it."""
    return rank.save(2, STATE, occasion="preemption", wait=True) and rank.finish()


def end(rank: Saving) -> object:
    assert rank.queue.await_all() is None
    return rank.queue.maybe_finalize()


@pytest.mark.parametrize("waits", [finish, save_at_once, end])
def test_who_waits_has_it_written_as_fast_as_can_be(
    tmp_path: Path, waits: Callable[[Saving], object]
) -> None:
    with saving(tmp_path, write_bytes_per_s=NEVER) as rank:
        rank.save(1, STATE)
        assert waits(rank) in ([1], [1, 2])
    assert same(load(tmp_path, 1, blank()), STATE)


@pytest.mark.parametrize("occasion", ["requested", "preemption", "end"])
def test_what_was_asked_for_is_not_held_up(tmp_path: Path, occasion: str) -> None:
    with saving(tmp_path, write_bytes_per_s=NEVER) as rank:
        rank.save(1, STATE, occasion=occasion)
        until(rank.queue.maybe_finalize, "it is durable", within_s=WITHIN_S)


def test_in_waves_the_training_waits_already(tmp_path: Path) -> None:
    with saving(tmp_path, write_bytes_per_s=NEVER, memory_limit=18 * MIB) as rank:
        rank.save(1, STATE)
        until(rank.queue.maybe_finalize, "it is durable", within_s=WITHIN_S)


def test_images_are_kept_though_the_way_to_the_global_tier_takes_for_ever(tmp_path: Path) -> None:
    """Nobody should wait for a slow storage to have a state outside the own memory."""
    with saving(tmp_path, write_bytes_per_s=NEVER, keeps=True, buffers=2) as rank:
        rank.save(1, STATE)
        until(lambda: len(rank.events("image")) == 1, "it is kept", within_s=WITHIN_S)
        rank.save(2, STATE, to_root=False)
        until(lambda: len(rank.events("image")) == 2, "this one is, too", within_s=WITHIN_S)
        assert not rank.queue.maybe_finalize(), "the first one waits to be written"
        assert [one["step"] for one in rank.events("image")] == [1, 2]
        assert rank.finish() == [1, 2]
    assert same(load(tmp_path, 1, blank()), STATE)


def test_a_save_that_is_skipped_makes_the_one_in_its_way_hurry(tmp_path: Path) -> None:
    with saving(tmp_path, write_bytes_per_s=NEVER) as rank:
        rank.save(1, STATE)
        assert rank.save(2, STATE) is None
        until(rank.queue.maybe_finalize, "it is durable", within_s=WITHIN_S)


def test_however_many_are_skipped_a_writer_that_takes_no_word_holds_up_nobody(
    tmp_path: Path,
) -> None:
    with saving(tmp_path) as rank:
        rank.queue.warm()
        stop(rank.writer)
        rank.save(1, STATE)
        assert {rank.save(step, STATE) for step in range(2, 1000)} == {None}
        os.kill(rank.writer, signal.SIGCONT)
        assert rank.finish() == [1]


def test_a_save_that_steps_notice_has_the_next_one_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    for module in (checkpointer, saver):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])

    def steps(each_s: float) -> None:
        for _ in range(9):
            now[0] += each_s
            saves.step(1, {})

    with Checkpointer(tmp_path, every=1 << 40, job=JOB) as saves:
        queue = saves._queue
        steps(0.1)
        pid = queue.writer_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # the steps below are made while it writes
        saves.save(1, STATE, occasion="interval")
        steps(0.11)
        os.kill(pid, signal.SIGCONT)
        assert saves.maybe_finalize(blocking=True, within_s=WITHIN_S) == [1]
        now[0] += 60
        saves.save(2, STATE, occasion="interval")
        order = queue._saves[2].order
        assert isinstance(order, WriteState)
        assert order.bytes_per_s == pytest.approx(order.file_bytes / (8 * 0.11 * 0.1 / 0.03))
    assert "rank 0: saves are written over 2.9 s from now on: steps took 1.10" in (
        capsys.readouterr().err
    )


def test_less_than_can_be_told_from_a_hang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be 0 or at least 4194304, got 1000: a save so"):
        Checkpointer(tmp_path, write_bytes_per_s=1000)
