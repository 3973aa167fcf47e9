"""Wrong arguments raise at the call, with the value in one line, and do not affect other saves."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint_helpers.saved_by import WITHIN_S
from trainer_sdk import testing
from trainer_sdk.checkpoint import (
    Checkpointer,
    FileSaver,
    PositionedSampler,
    Timeouts,
    async_save,
    wait_for_files,
)
from trainer_sdk.checkpoint.job_context import read_job_context

STATE: dict[str, Any] = {"weights": torch.ones(3)}
WRONG_STEPS: list[Any] = [
    "7", -1, 1.0, None, True, math.nan, np.float64(7), np.bool_(True), torch.tensor(1.5),
    torch.tensor([1, 2]), torch.tensor(True), 1 << 63, b"7", [7], {},
]  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with testing.watched():
        yield


def refused(call: Callable[[], object], name: str) -> str:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    said = str(raised.value)
    assert name in said
    assert "\n" not in said
    return said


def test_ranks_that_were_launched_together_need_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a group each rank would be rank 0 of 1, and take other ranks' states for its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2, and this rank has no process group"):
        Checkpointer(tmp_path / "root")
    monkeypatch.setenv("WORLD_SIZE", "1")
    Checkpointer(tmp_path / "root").close()


def test_a_wrong_step_is_refused_and_the_next_save_succeeds(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", on_error="fatal") as saves:
        writer = saves._queue.writer_pid
        for step in WRONG_STEPS:
            for call in (saves.save, saves.step, saves.save_last):
                assert repr(step)[:20] in refused(partial(call, step, STATE), "step")
            if step is not None:
                refused(partial(saves.restore, dict(STATE), step=step), "step")
        saves.save(3, STATE)
        assert len(saves.maybe_finalize(blocking=True, within_s=WITHIN_S)) == 1
        assert saves._queue.writer_pid == writer, "no argument has ended it"


def test_whole_numbers_of_numpy_and_torch_are_whole_numbers(tmp_path: Path) -> None:
    every: Any = np.int32(7)
    numbers: list[Any] = [np.int64(7), np.uint8(14), torch.tensor(21), np.array(28)]
    with Checkpointer(tmp_path / "root", on_error="fatal", every=every) as saves:
        for step in numbers:
            saves.step(step, STATE)
            assert len(saves.maybe_finalize(blocking=True, within_s=WITHIN_S)) == 1
        for step in numbers:
            found = saves.restore(dict(STATE), step=step)
            assert found is not None
            assert found.step == int(step)


WRONG_SAVES: list[tuple[str, Any]] = [
    ("state", torch.nn.Linear(1, 1)), ("state", None), ("state", [1]), ("finalize", print),
    ("finalize", ("no",)), ("finalize", None), ("occasion", 3), ("occasion", "a\nb"),
    ("occasion", None), ("to_root", "yes"), ("wait", 1), ("wait", None),
]  # fmt: skip


def test_each_argument_of_a_save_is_checked_at_the_call(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", on_error="fatal") as saves:
        for name, value in WRONG_SAVES:
            given: dict[str, Any] = {"step": 1, "state": STATE} | {name: value}
            refused(partial(saves.save, **given), name)
        assert saves.unfinished == 0


WRONG_CHECKPOINTERS: list[tuple[str, Any]] = [
    ("root", b"x"), ("root", 3), ("root", None), ("root", "a\0b"), ("every", 0), ("every", True),
    ("every", 1.5), ("every", "often"), ("every", None), ("memory_every", -1),
    ("memory_every", "2"), ("keep_memory", "no"), ("on_error", "ignore"), ("on_error", None),
    ("lazy", None), ("optimizers", 3), ("optimizers", (3,)), ("in_flight", 0), ("in_flight", 9),
    ("in_flight", "1"), ("memory_limit", -1), ("memory_limit", "1GiB"),
    ("max_overhead", 0), ("max_overhead", 1.5), ("max_overhead", "1%"), ("max_overhead", True),
    ("write_bytes_per_s", "fast"), ("write_bytes_per_s", -1), ("job", "../x"), ("job", "a/b"),
    ("job", 3), ("job", "-x"), ("job", "x" * 129), ("job", "a\n"), ("timeouts", 3.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_CHECKPOINTERS)
def test_each_argument_of_a_checkpointer_is_checked_at_the_call(
    name: str, value: Any, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"root": tmp_path / "root", name: value}
    refused(lambda: Checkpointer(**given), name)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, "1", None, True])
@pytest.mark.parametrize("name", ["delayed_after_s", "write_within_s", "exit_within_s"])
def test_timeouts_are_finite(name: str, value: Any) -> None:
    """JSON to the writer cannot carry an infinite time."""
    given: dict[str, Any] = {name: value}
    refused(lambda: Timeouts(**given), name)


def test_the_name_of_a_job_in_the_environment_stays_in_its_folder() -> None:
    refused(lambda: read_job_context({"EVERSTEP_JOB": "../x"}), "'../x'")


def test_arguments_of_restore_and_of_the_rest_are_checked(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as saves:
        wrong: Any = ["x"]
        refused(lambda: saves.restore(wrong), "state")
        refused(lambda: saves.restore({}, allow_fresh_start=wrong), "allow_fresh_start")
        refused(lambda: saves.maybe_finalize(within_s=wrong), "within_s")
        refused(lambda: saves.maybe_finalize(wrong), "blocking")
        refused(lambda: saves.check_loss(wrong), "loss")
        refused(lambda: saves.check_loss("0.1"), "loss")  # type: ignore[arg-type]
    refused(lambda: PositionedSampler(10, batch_size=wrong), "batch_size")
    refused(lambda: PositionedSampler(10, batch_size=2, place=(3, 2)), "place")


def test_arguments_of_files_are_checked(tmp_path: Path) -> None:
    wrong: Any = 3
    refused(lambda: async_save({}, wrong), "path")
    refused(lambda: async_save({}, b"x"), "path")  # type: ignore[arg-type]
    refused(lambda: wait_for_files(-1), "within_s")
    refused(lambda: FileSaver(wrong), "on_error")
    refused(lambda: FileSaver(in_flight=0), "in_flight")
    files = FileSaver()
    refused(lambda: files.schedule({}, tmp_path / "x", finalize=wrong), "finalize")
    files.close()


def test_a_save_in_inference_mode_does_not_break_later_saves(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def step() -> None:
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()

    with Checkpointer(tmp_path / "root", on_error="fatal") as saves:
        step()
        with torch.inference_mode():
            saves.save(1, state, wait=True)
        for number in (2, 3, 4):
            step()
            assert saves.save(number, state, wait=True).durable
    with Checkpointer(tmp_path / "root", on_error="fatal") as saves:
        with torch.inference_mode():
            assert saves.restore(state) is not None
        step()
        saves.save(5, state)
    file, name = FileSaver("fatal"), tmp_path / "x.pt"
    with torch.inference_mode():
        file.schedule(model.state_dict(), name)
    file.schedule(model.state_dict(), name)
    file.close()
    assert torch.equal(torch.load(name)["weight"], model.weight)
