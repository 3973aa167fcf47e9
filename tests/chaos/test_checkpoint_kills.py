"""Ranks and writers killed again and again: whoever comes next goes on from a verified state."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripted import run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Without a disk to wait for."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


def test_500_kills_of_writers_at_counted_points_lose_nothing_that_was_visible(
    tmp_path: Path,
) -> None:
    found = run("killing.py", tmp_path, 500, 20, within_s=890)
    assert found["wrong"] == []
    assert found["killed"] == 500
    assert found["amid"] >= 50


@pytest.mark.timeout(3600)
def test_a_training_killed_500_times_takes_the_steps_of_an_undisturbed_one(folder: Path) -> None:
    found = run("killed_training.py", folder, 500, 3, 60, within_s=3590)
    assert found["wrong"] == []
    assert found["killed"] == 500
    assert found["amid"] >= 100
