"""Agents killed again and again while they keep, send, fetch and drop states."""

import tempfile

import pytest

from tests.scripted import run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def test_500_kills_of_agents_at_counted_points_lose_nothing_and_leave_nothing() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        found = run("keeping.py", memory, 500, 20, within_s=890)
    assert found["wrong"] == []
    assert found["left"] == []
    assert sum(found["killed"].values()) == 500
