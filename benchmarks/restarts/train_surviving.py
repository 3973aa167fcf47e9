"""The same training with `run.survive`: processes of ranks that have not failed go on."""

import sys
from pathlib import Path
from typing import Any

from torch import nn

import trainer_sdk
from benchmarks.restarts import steps
from benchmarks.restarts.train import Descent

run = trainer_sdk.session()


def build() -> dict[str, Any]:
    model = nn.Linear(64, 64)
    return {"model": model, "optimizer": Descent(model.parameters())}


@run.survive(build)
def train(state: dict[str, Any], _: int) -> None:
    rests = "rest" in sys.argv[2:]
    steps.step_for_ever(
        Path(sys.argv[1]), state["model"], state["optimizer"], run.step, rests=rests
    )


train()
