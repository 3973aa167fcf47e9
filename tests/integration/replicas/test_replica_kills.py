"""Agents killed wherever they keep, send, fetch or drop a state: a verified one is always there."""

import tempfile

import pytest

from tests.scripted import run


@pytest.mark.timeout(180)
def test_50_kills_of_agents_at_counted_points_lose_nothing_and_leave_nothing() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        found = run("keeping.py", memory, 50, 1, within_s=150)
    assert found["wrong"] == []
    assert found["left"] == []
    assert sum(found["killed"].values()) == 50
    assert min(found["killed"].values()) >= 10
