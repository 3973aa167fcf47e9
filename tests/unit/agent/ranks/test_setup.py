"""What an agent reads of a rank's own files."""

import json
from pathlib import Path

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
