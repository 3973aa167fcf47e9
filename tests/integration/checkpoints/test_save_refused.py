"""Saves that are not even begun: what follows is the policy's, on all ranks alike."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import JOB, WITHIN_S, Saving, saving
from tests.unit.trainer_sdk.checkpoint.saved_states import KeptReports, together
from trainer_sdk.checkpoint import Checkpointer, SaveError, SaveHandle, Timeouts, script_end
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.save.buffers import NoRoomError
from trainer_sdk.checkpoint.save.request import OnError
from trainer_sdk.checkpoint.save.staging import Stager, Staging
from trainer_sdk.checkpoint.schedule.interval import Every, IntervalBounds, IntervalEstimate
from trainer_sdk.checkpoint.schedule.save_schedule import SaveSchedule

STATE: dict[str, Any] = {"a": torch.arange(1 << 16)}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


def without_room(rank: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(size: int) -> None:
        raise NoRoomError("/dev/shm", size, 0)

    for one in rank.saver._preparation.arena.buffers:
        monkeypatch.setattr(one, "fit", fit)


def has_failed(rank: Saving, step: int, on_error: OnError) -> bool:
    """This save is refused, and the caller hears of it as the policy says."""
    if on_error == "fatal":
        with pytest.raises(SaveError, match=f"the save of step {step} failed at memory"):
            rank.save(step, STATE)
    else:
        assert rank.save(step, STATE) is None
    failure = rank.queue.await_all()
    return failure is not None


@pytest.mark.parametrize("on_error", ["warn", "retry", "fatal"])
def test_too_little_memory_on_one_rank_is_the_same_on_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, on_error: OnError
) -> None:
    def one(group: RankGroup) -> tuple[list[int], list[bool], list[str]]:
        with saving(folder, group, on_error=on_error) as rank:
            if group.rank:
                without_room(rank, monkeypatch)
            failed = [has_failed(rank, step, on_error) for step in (1, 2)]
            if group.rank:
                monkeypatch.undo()
            assert rank.save(3, STATE) is not None
            assert rank.finish() == [1]
            failed.append(rank.queue.await_all() is not None)
            refused = [one["step"] for one in rank.events("refused")]
            assert not rank.events("failed"), "it is reported as a refusal"
            return refused, failed, rank.told.warned

    (told, failed, warned), (told_there, failed_there, warned_there) = together(2, one)
    assert (told, told_there) == ([], [1, 2])
    at_the_end = on_error == "retry"
    assert failed == failed_there == [at_the_end, at_the_end, False]
    assert warned == []
    assert len(warned_there) == (0 if on_error == "fatal" else 2)


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not initialised")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def no_room(saves: Checkpointer, patch: pytest.MonkeyPatch) -> SaveHandle:
    def fit(size: int) -> None:
        raise NoRoomError("/dev/shm", size, 0)

    for buffer in saves._saver._preparation.arena.buffers:
        patch.setattr(buffer, "fit", fit)
    return saves.save_last(2, STATE)


def no_buffer(saves: Checkpointer, patch: pytest.MonkeyPatch) -> SaveHandle:
    patch.setattr(saves._saver._preparation.arena, "next", lambda: None)
    return saves.save_last(2, STATE)


def unreadable(saves: Checkpointer, _: pytest.MonkeyPatch) -> SaveHandle:
    return saves.save_last(2, STATE | {"it": Broken()})


def placeless(saves: Checkpointer, _: pytest.MonkeyPatch) -> SaveHandle:
    return saves.save(2, STATE, to_root=False)


def nested(saves: Checkpointer, _: pytest.MonkeyPatch) -> SaveHandle:
    with saves._queue.beginning(1):
        return saves.save_last(2, STATE)


def closed(saves: Checkpointer, _: pytest.MonkeyPatch) -> SaveHandle:
    saves.close()
    return saves.save_last(2, STATE)


REFUSED = (no_room, no_buffer, unreadable, placeless, nested, closed)


@pytest.mark.parametrize("on_error", ["warn", "retry", "fatal"])
@pytest.mark.parametrize("refused", REFUSED)
def test_a_last_save_that_is_refused_decides_how_the_training_ends(
    folder: Path,
    refused: Callable[[Checkpointer, pytest.MonkeyPatch], SaveHandle],
    on_error: OnError,
) -> None:
    """Also while an earlier good save is not finalized (A8.6)."""
    timeouts = Timeouts(exit_within_s=0.05 if refused is no_buffer else WITHIN_S)
    saves = Checkpointer(folder / "root", job=JOB, on_error=on_error, timeouts=timeouts)
    assert saves.save(1, STATE).wait(WITHIN_S)
    with pytest.MonkeyPatch.context() as patch:
        if on_error == "fatal":
            with pytest.raises(SaveError, match="the save of step 2 failed"):
                refused(saves, patch)
        else:
            assert refused(saves, patch).state == "failed"
    at_the_end = on_error == "retry"
    assert (script_end.script_ended(0) is not None) is at_the_end
    if at_the_end:
        with pytest.raises(SaveError, match="the save of step 2 failed"):
            saves.close()
    saves.close()
    assert script_end.script_ended(0) is None


def test_with_retry_a_good_save_makes_up_for_a_refused_save(folder: Path) -> None:
    with Checkpointer(folder / "root", job=JOB, on_error="retry") as saves:
        assert saves.save(1, STATE | {"it": Broken()}).state == "failed"
        assert saves.save(2, STATE).wait(WITHIN_S)


def test_a_finalize_function_that_raises_does_not_hide_a_failed_save(folder: Path) -> None:
    def raises() -> None:
        raise ValueError("the training's own")

    saves = Checkpointer(folder / "root", job=JOB, on_error="retry")
    assert saves.save(1, STATE, finalize=(raises,)).wait(WITHIN_S)
    unreadable(saves, pytest.MonkeyPatch())
    failure = script_end._left(saves._ending, is_failing=False)
    assert "the save of step 2 failed" in str(failure)


def test_with_fatal_the_next_save_raises_the_failure_of_an_earlier_save(folder: Path) -> None:
    """A script that calls `save` alone hears of it, and once (A8.2)."""
    (folder / "root").write_text("a file")
    with Checkpointer(folder / "root", job=JOB, on_error="fatal") as saves:
        assert not saves.save(1, STATE).wait(WITHIN_S)
        with pytest.raises(SaveError, match="rank 0: the save of step 1 failed at"):
            saves.save(2, STATE)
        (folder / "root").unlink()
        assert saves.save(2, STATE).wait(WITHIN_S)


def test_a_state_that_cannot_be_read_on_one_rank_is_fatal_on_all(folder: Path) -> None:
    def one(group: RankGroup) -> str:
        state = STATE | {"it": Broken()} if group.rank else STATE
        with saving(folder, group, on_error="fatal") as rank, pytest.raises(SaveError) as raised:
            rank.save(1, state)
        return str(raised.value)

    other, own = together(2, one)
    assert "another rank has reported why" in other
    assert "not initialised" in own


@pytest.mark.parametrize("on_error", ["warn", "retry", "fatal"])
def test_a_quota_without_another_place_is_no_success(folder: Path, on_error: OnError) -> None:
    context = JobContext(JOB, 1, str(folder / "images"), has_keeper=True, images_most_bytes=1 << 18)
    kept: dict[str, Any] = {"root": "", "keeps": True, "buffers": 2, "context": context}
    with saving(folder, on_error=on_error, **kept) as rank:
        for step in (1, 2):
            if on_error == "fatal":
                with pytest.raises(SaveError, match=f"step {step} failed at keep: there is no"):
                    rank.save(step, STATE, to_root=False)
            else:
                assert rank.save(step, STATE, to_root=False) is None
        assert (rank.queue.await_all() is not None) is (on_error == "retry")


def test_a_limit_that_is_too_small_is_named_with_what_helps(folder: Path) -> None:
    with saving(folder, keeps=True, buffers=2, memory_limit=1 << 16) as rank:
        assert rank.save(1, STATE) is None
        assert "memory_limit is 65536 bytes, and " in rank.told.warned[0]
        assert "raise it, or do without keep_memory" in rank.told.warned[0]
    with saving(folder, memory_limit=1 << 10) as rank:
        assert rank.save(1, STATE) is None
        (refused,) = rank.events("refused")
        assert refused["reason"].endswith("do not fit: raise it")
        needed = refused["needed_bytes"]
    with saving(folder, memory_limit=needed) as rank:
        assert rank.save(1, STATE) is not None, "the named amount is enough"
        assert rank.finish() == [1]


def test_what_comes_after_the_end_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody would wait until it is durable."""
    saves = Checkpointer(folder / "root", job=JOB)
    saves.close()
    assert saves.save_last(5, STATE).state == "failed"
    assert (
        "the save of step 5 failed at plan: its Checkpointer is closed" in capsys.readouterr().err
    )
    assert not (folder / "root").exists()


def test_a_save_that_interrupts_another_is_refused_and_does_not_wait_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a handler of SIGTERM saves, and comes while the training does."""
    plain, handled = Stager.go_on, []

    def go_on(stager: Stager, staging: Staging) -> None:
        signal.raise_signal(signal.SIGUSR1)
        plain(stager, staging)

    monkeypatch.setattr(Stager, "go_on", go_on)
    with Checkpointer(folder / "root", job=JOB) as saves:
        before = signal.signal(
            signal.SIGUSR1, lambda *_: handled.append(saves.save(6, STATE, wait=True))
        )
        try:
            assert saves.save(5, STATE).number == 1
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert saves.maybe_finalize(blocking=True, within_s=WITHIN_S) == [1]
    assert [one.state for one in handled] == ["failed"]
    assert "the save of step 6 failed at copy: it interrupts another" in capsys.readouterr().err


@pytest.mark.parametrize("keeps", [True, False])
def test_ranks_that_do_not_save_the_same_hear_of_it_at_once(folder: Path, keeps: bool) -> None:
    """They would wait half an hour for each other's parts."""

    def one(group: RankGroup) -> list[str]:
        with saving(folder, group, keeps=keeps, buffers=2) as rank:
            assert rank.save(5 + group.rank, STATE) is None
            assert rank.save(6, STATE, to_root=not group.rank) is None
            assert rank.save(7, STATE) is not None
            assert rank.finish() == [1]
            return rank.told.warned

    own, other = together(2, one)
    assert "the ranks disagree on the step: the lowest is 5 and the highest 6; have" in own[0]
    assert "some ranks save into the root and others do not" in own[1]
    assert len(own) == len(other) == 2


def test_ranks_that_are_not_at_one_step_hear_of_it_when_a_save_is_looked_for() -> None:
    def one(group: RankGroup) -> str:
        pacing = SaveSchedule(
            Every(),
            group,
            KeptReports(),
            IntervalEstimate(Every(), IntervalBounds(), failures=0, ran_s=0.0),
        )
        try:
            pacing.is_due(5 + group.rank, is_saving=False)
        except ValueError as error:
            return str(error)
        return ""

    own, other = together(2, one)
    assert own == ""
    assert other.startswith("rank 1 has finished step 6, and rank 0 step 5")
