"""Frameworks pass over skipped data: over epochs, with accumulated gradients, after a resume."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.frameworks.in_process import EPOCH, TRAININGS, train_with_lightning
from trainer_sdk import testing
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.numerics.rollback import record
from trainer_sdk.numerics.skips import Skips


@pytest.fixture(autouse=True)
def watch() -> Iterator[testing.Watch]:
    """As a script that nobody has launched."""
    with testing.watched() as watch:
        yield watch


def skip(folder: Path, *spans: tuple[int, int]) -> None:
    """Write down that the data of these spans are skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    skips = Skips(storage_for(str(folder)), RankGroup(None))
    for number, span in enumerate(spans):
        act = record(f"{number:016x}", "skip", 1, "a test", samples=span)
        assert skips.add(act) == ""


@pytest.mark.filterwarnings("ignore")  # Lightning warns of itself
@pytest.mark.parametrize("framework", TRAININGS)
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("stops", [(12,), (2, 12), (4, 8, 12)])
def test_skipped_data_are_passed_over_in_each_epoch_and_after_each_resume(
    tmp_path: Path, framework: str, accumulated: int, stops: Sequence[int]
) -> None:
    """The last batch of the first epoch and the first one of the second are among them."""
    steps_of_epoch = -(-EPOCH // accumulated)
    in_steps = [(1, 2), (steps_of_epoch - 1, steps_of_epoch + 2)]
    steps = [
        [number % EPOCH for number in range(epoch * EPOCH, (epoch + 1) * EPOCH)][
            at : at + accumulated
        ]
        for epoch in range(14)
        for at in range(0, EPOCH, accumulated)
    ]
    kept = [
        step
        for number, step in enumerate(steps)
        if not any(first <= number < end for first, end in in_steps)
    ]
    spans = in_steps
    if framework == "lightning":  # counts batches
        spans = [
            (batches_of(first, accumulated), batches_of(end, accumulated))
            for first, end in in_steps
        ]
    skip(tmp_path, *spans)
    used: list[int] = []
    for stop in stops:
        TRAININGS[framework](tmp_path, stop, used, accumulated)
    assert used == [sample for step in kept[: stops[-1]] for sample in step]


@pytest.mark.filterwarnings("ignore")  # Lightning warns of itself
def test_lightning_validates_an_epoch_without_its_skipped_data(tmp_path: Path) -> None:
    """Also one that is resumed in its middle; its last batch is among the skipped ones."""
    skip(tmp_path, (1, 2), (EPOCH + 8, 2 * EPOCH))
    used: list[int] = []
    validated: list[int] = []
    for stop in (4, 3 * EPOCH - 4):
        train_with_lightning(tmp_path, stop, used, validated=validated)
    assert validated == [EPOCH - 1, EPOCH - 1 + 8, 3 * EPOCH - 4]


def batches_of(step: int, accumulated: int) -> int:
    """How many batches the steps before this one use, without any skipped."""
    steps_of_epoch = -(-EPOCH // accumulated)
    epoch, number = divmod(step, steps_of_epoch)
    return epoch * EPOCH + number * accumulated
