"""`Checkpointer.step` counts the steps of a session whose script does not (E8)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import trainer_sdk
from trainer_sdk import testing
from trainer_sdk.testing import Watch

STATE = {"weights": torch.ones(3)}


@pytest.fixture(autouse=True)
def watch() -> Iterator[Watch]:
    with testing.watched() as watch:
        yield watch


@pytest.fixture
def saves(watch: Watch, tmp_path: Path) -> Iterator[trainer_sdk.Checkpointer]:
    with trainer_sdk.Checkpointer(tmp_path, every=1000, job="steps") as saves:
        yield saves


def test_steps_are_counted_where_the_script_counts_none(
    saves: trainer_sdk.Checkpointer, watch: Watch
) -> None:
    for step in range(5, 9):
        saves.step(step, STATE)
    assert watch.step == 8


@pytest.mark.parametrize("first", [1, 41])
@pytest.mark.parametrize("is_before", [True, False])
def test_steps_that_the_script_counts_are_counted_once_and_have_its_numbers(
    saves: trainer_sdk.Checkpointer, watch: Watch, is_before: bool, first: int
) -> None:
    """Also if the script counts a step after the call of the Checkpointer."""
    calls: list[Callable[[int], object]] = [
        lambda _: trainer_sdk.session().step(),
        lambda step: saves.step(step, STATE),
    ]
    for step in range(first, first + 5):
        for call in calls if is_before else reversed(calls):
            call(step)
    assert watch.step == first + 4
    assert (watch.reading.steps, watch.reading.is_numbered) == (5, True)


def test_the_number_of_a_save_is_not_that_of_a_step_with_several_parts(
    saves: trainer_sdk.Checkpointer, watch: Watch
) -> None:
    for step in range(1, 4):
        for _ in range(4):
            trainer_sdk.session().step()
        saves.step(step, STATE)
    assert (watch.step, watch.reading.is_numbered) == (12, False)


def test_a_script_that_counts_no_steps_is_asked_to_stop_as_well(
    saves: trainer_sdk.Checkpointer, watch: Watch, tmp_path: Path
) -> None:
    watch.ask_to_stop(after_step=3)
    step = 0
    while not trainer_sdk.session().should_stop:
        step += 1
        assert step < 10, "it is never asked to stop"
        saves.step(step, STATE)
    assert step == 3
    saves.close()
    assert (tmp_path / "step-000000003").exists()
