"""Writers killed at every operation that could be durable or not: nothing visible is ever torn."""

from pathlib import Path

import pytest

from tests.checkpoint_helpers.killing_server import KILLS
from tests.contract.s3_server import BUCKET, s3_server
from tests.scripted import run


@pytest.mark.timeout(180)
def test_wherever_writers_are_killed_a_verified_checkpoint_is_there_as_new_as_the_last(
    tmp_path: Path,
) -> None:
    """A kill at each operation of a save (A5.5, A8.1)."""
    found = run("killing.py", tmp_path, "each", within_s=150)
    assert found["wrong"] == []
    assert found["killed"] >= 200
    amid = "of either, in three ways, before each piece but the first; in waves, between two"
    assert found["amid"] >= 42, amid
    assert found["ended"] == 8
    # Before the place is anybody's, a kill may leave a file that was to say whose it is.
    assert [one for one in found["left"] if "/.owner.json." not in one] == []


@pytest.mark.timeout(120)
def test_writers_killed_while_they_send_to_an_object_store_leave_nothing_torn(
    tmp_path: Path,
) -> None:
    """Eight kills, and a real S3 server (A8.1)."""
    with s3_server(tmp_path, KILLS) as environ:
        url = f"s3://{BUCKET}/killed"
        found = run("killing.py", tmp_path, 8, 3, url, within_s=100, environ=environ)
    assert found["wrong"] == []
    assert found["killed"] == 8
    assert found["amid"]
    assert found["left"] == [], (
        "other files than checkpoints, after dead saves have been swept away"
    )
    assert found["unfinished"], "uploads that its bucket's own rule is to abort"
