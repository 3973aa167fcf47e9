"""A training has the same batches and gradients with another number of ranks: on real ranks."""

import json
import subprocess
import sys
import tempfile
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from trainer_sdk.checkpoint.data import PositionedSampler

SCRIPT = Path(__file__).parent / "shared.py"
GLOBAL_BATCH, SIZE, ROUNDS, STEPS = 13, 50, 3, 4

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("shared")]


@cache
def trained() -> dict[str, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, str(SCRIPT), folder],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        files = {
            name: [Path(folder) / f"{name}-{number}.json" for number in range(ROUNDS)]
            for name in ("changing", "two", "two again", "alone")
        }
        return {name: [_told(file, run.stderr) for file in own] for name, own in files.items()}


def _told(file: Path, stderr: str) -> dict[str, Any]:
    assert file.exists(), stderr
    told: dict[str, Any] = json.loads(file.read_text())
    return told


def test_at_the_same_number_of_ranks_it_is_the_same_bit_for_bit() -> None:
    assert trained()["two"] == trained()["two again"]


@pytest.mark.parametrize("name", ["changing", "two"])
def test_at_another_number_only_the_order_of_summation_differs(name: str) -> None:
    for own, alone in zip(trained()[name], trained()["alone"], strict=True):
        assert own["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert own["weights"] == pytest.approx(alone["weights"], rel=1e-9, abs=1e-12)


def test_each_round_continues_with_the_next_samples() -> None:
    count = GLOBAL_BATCH * ROUNDS * STEPS
    order = next(iter(PositionedSampler(SIZE, batch_size=count, seed=5, place=(0, 1))))
    steps = [sorted(order[at : at + GLOBAL_BATCH]) for at in range(0, count, GLOBAL_BATCH)]
    for rounds in trained().values():
        for number, told in enumerate(rounds):
            own = sorted(chain.from_iterable(told["samples"]))
            assert own == sorted(chain.from_iterable(steps[number * STEPS : (number + 1) * STEPS]))
