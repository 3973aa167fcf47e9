"""A poisoned batch is passed over, and the training is one that has never seen it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.integration.numerics.poisoned import POISONED_STEP, SPAN, STEPS, WORLD


@pytest.mark.timeout(180)
def test_the_losses_are_those_of_a_training_without_the_batch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-m", "tests.integration.numerics.poisoned", folder]
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=170, check=False)
        assert run.returncode == 0, run.stderr
        files = [Path(folder) / f"rank-{rank}.json" for rank in range(WORLD)]
        ranks = [json.loads(file.read_text()) for file in files]
    for rank in ranks:
        assert len(rank["poisoned"]["losses"]) == STEPS
        assert rank["poisoned"]["losses"] == rank["clean"]["losses"]
        assert rank["poisoned"]["consumed"] == rank["clean"]["consumed"]
    suspected, judged, acted, *more = ranks[0]["poisoned"]["events"]
    assert (suspected["step"], suspected["signal"]) == (POISONED_STEP, "nan")
    assert judged["kind"] == "correct_but_unexpected"
    assert (acted["action"], acted["outcome"]) == ("skip", "done")
    assert (acted["samples_from"], acted["samples_to"]) == SPAN
    assert acted["to_step"] < POISONED_STEP
    assert not [event for event in more if event["event"] != "counted"]
