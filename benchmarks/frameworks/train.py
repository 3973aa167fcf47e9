"""Train the toy of a framework for ever: `train.py FOLDER FRAMEWORK`.

Each rank leaves a mark when it has finished its first step, as the trainings of
`benchmarks.restarts` do; the toys are those of the tests, and save at each fifth step.
"""

import importlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.restarts.steps import PACE_S, mark

TOYS = {
    "torch": "torch_toy",
    "lightning": "lightning_toy",
    "transformers": "hugging_face",
    "accelerate": "accelerate_toy",
    "deepspeed": "deepspeed_toy",
}
_STEPS = 10**6


class _FirstStep:
    """Takes the place of the toys' own log of steps."""

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        self._is_marked = False

    def __call__(self, _folder: Path, _step: int) -> None:
        if not self._is_marked:
            self._is_marked = True
            life = torch.tensor([os.getpid()])
            dist.broadcast(life, 0)
            mark(self._marks, int(life))
        time.sleep(PACE_S)


def main(marks: Path, framework: str) -> None:
    toy = importlib.import_module(f"tests.integration.frameworks.scripts.{TOYS[framework]}")
    vars(toy)["note_step"] = _FirstStep(marks)
    toy.main(marks.parent / "training", _STEPS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
