"""A training killed again and again goes on from what there is, as if nobody had killed it."""

import tempfile

import pytest

from tests.scripted import run


@pytest.mark.timeout(400)
def test_a_training_killed_50_times_takes_the_steps_of_an_undisturbed_one() -> None:
    """Each restart goes on from a verified checkpoint (A8.1)."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # no disk to wait for
        found = run("killed_training.py", folder, 50, 5, 24, within_s=390)
    assert found["wrong"] == []
    assert found["killed"] == 50
    assert found["amid"] >= 10
