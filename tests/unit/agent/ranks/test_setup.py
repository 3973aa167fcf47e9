"""What an agent reads of a rank's own files."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep_services.agent.ranks.setup import read_error
from trainer_sdk import layout

TOKEN = "hf_" + "AbCd" * 8
KEY = "wJalrXUtnFEMI/K7MDENG"


def test_secrets_in_an_exception_do_not_leave_the_node(tmp_path: Path) -> None:
    """Neither the bus nor the database has them; the lines around them stay (A13.2)."""
    text = f"upload refused: token={TOKEN} AWS_SECRET_ACCESS_KEY={KEY} in shard 7"
    traceback = (
        f'File "train.py", line 8, in step\n    raise ValueError("{text}")\nValueError: {text}'
    )
    record = {"name": "ValueError", "text": text, "traceback": traceback, "place": "train.py:8"}
    (tmp_path / layout.ERROR_FILE).write_text(json.dumps(record))

    error = read_error(tmp_path)

    assert error is not None
    assert TOKEN not in f"{error.text}{error.traceback}"
    assert KEY not in f"{error.text}{error.traceback}"
    assert error.text.startswith("upload refused: ")
    assert error.text.endswith(" in shard 7")
    assert "train.py" in error.traceback
    assert (error.name, error.place) == ("ValueError", "train.py:8")


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda at: at.symlink_to("/dev/zero"),
        lambda at: at.write_text('{"name": ' + "[" * 100_000),
        lambda at: at.write_bytes(b'{"name": "\xff"}'),
        lambda at: at.write_text(json.dumps({"name": "E", "text": "x" * (2 << 20)})),
    ],
    ids=["FIFO", "folder", "device", "depth", "bytes", "size"],
)
def test_what_no_rank_records_is_no_exception(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    """A script may leave anything there: it neither holds nor ends the agent."""
    make(tmp_path / layout.ERROR_FILE)
    assert read_error(tmp_path) is None
