"""Ranks and writers killed again and again: whoever comes next goes on from a verified state."""

from pathlib import Path

import pytest

from tests.scripted import run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def test_500_kills_of_writers_at_counted_points_lose_nothing_that_was_visible(
    tmp_path: Path,
) -> None:
    found = run("killing.py", tmp_path, 500, 20, within_s=890)
    assert found["wrong"] == []
    assert found["killed"] == 500


def test_a_training_killed_100_times_takes_the_steps_of_an_undisturbed_one(tmp_path: Path) -> None:
    found = run("killed_training.py", tmp_path, 100, 3, within_s=890)
    assert found["wrong"] == []
    assert found["killed"] == 100
