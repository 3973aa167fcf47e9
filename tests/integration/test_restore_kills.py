"""Writers killed at every operation that could be durable or not: nothing visible is ever torn."""

from pathlib import Path

import pytest

from tests.scripted import run


@pytest.mark.timeout(180)
def test_wherever_writers_are_killed_a_verified_checkpoint_is_there_as_new_as_the_last(
    tmp_path: Path,
) -> None:
    found = run("killing.py", tmp_path, "each", within_s=150)
    assert found["wrong"] == []
    assert found["killed"] >= 150
    assert found["amid"] >= 36, "of either, in three ways, before each piece but the first"
    assert found["ended"] == 6
    # Before the place is anybody's, a kill may leave a file that was to say whose it is.
    assert [one for one in found["left"] if "/.owner.json." not in one] == []
