"""Ranks and writers killed again and again: the next round goes on from a verified state."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint_helpers.killing_server import KILLS
from tests.contract.s3_server import BUCKET, s3_server
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
    """A verified checkpoint is there after each kill (A8.1)."""
    found = run("killing.py", tmp_path, 500, 20, within_s=890)
    assert found["wrong"] == []
    assert found["killed"] == 500
    assert found["amid"] >= 50


@pytest.mark.timeout(3600)
def test_a_training_killed_500_times_takes_the_steps_of_an_undisturbed_one(folder: Path) -> None:
    """Each restart goes on from a verified checkpoint (A8.1)."""
    found = run("killed_training.py", folder, 500, 3, 60, within_s=3590)
    assert found["wrong"] == []
    assert found["killed"] == 500
    assert found["amid"] >= 100


@pytest.mark.timeout(3600)
def test_writers_killed_at_each_point_of_sending_to_an_object_store_leave_nothing_torn(
    tmp_path: Path,
) -> None:
    """A real S3 server, and a kill at each point (A8.1)."""
    with s3_server(tmp_path, KILLS) as environ:
        url = f"s3://{BUCKET}/each"
        found = run("killing.py", tmp_path, "each", url, within_s=1790, environ=environ)
        assert found["wrong"] == found["left"] == []
        assert found["killed"] >= 120
        assert found["amid"] >= 36
        url = f"s3://{BUCKET}/random"
        found = run("killing.py", tmp_path, 100, 7, url, within_s=1790, environ=environ)
        assert found["wrong"] == found["left"] == []


def test_a_training_that_saves_to_an_object_store_alone_takes_the_same_steps(
    tmp_path: Path,
) -> None:
    """A hundred kills, and only the object store to restore from (A8.1)."""
    with s3_server(tmp_path, KILLS) as environ:
        url = f"s3://{BUCKET}/training"
        words = (tmp_path, 100, 3, 60, url)
        found = run("killed_training.py", *words, within_s=890, environ=environ)
    assert found["wrong"] == []
    assert found["killed"] == 100
    assert found["amid"] >= 20
