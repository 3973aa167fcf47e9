"""torchtitan's checkpoint manager and loader on data with a batch that breaks the loss.

`titan_numerics.py FOLDER`
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader

from tests.integration.frameworks.scripts.titan import Part
from trainer_sdk import testing
from trainer_sdk.integrations.torchtitan import TitanCheckpointManager
from trainer_sdk.integrations.torchtitan_numerics import NUMERICS
from trainer_sdk.numerics import NumericsPolicy
from trainer_sdk.numerics.rollback import RestartNeededError

STEPS, BROKEN, EVERY, PER_STEP = 80, 120, 10, 2
SKIP = NumericsPolicy(unexpected="skip")


class Counting(IterableDataset[Any]):
    """An endless data set that knows its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Metrics:
    """A metrics processor that only has the call of torchtitan's trainer."""

    def log(self, step: int, loss: float, highest: float, norm: float) -> None:
        """Nothing."""


class Training(Part):
    """What torchtitan's trainer does around its checkpoint manager."""

    def __init__(self, folder: Path, numerics: NumericsPolicy | None = SKIP) -> None:
        super().__init__()
        self.metrics_processor = Metrics()
        self.used: list[int] = []
        self.loader = ParallelAwareDataloader(Counting(), 0, 1, batch_size=1)
        self.manager = TitanCheckpointManager(
            TitanCheckpointManager.Config(
                enable=True,
                interval=EVERY,
                folder="checkpoint",
                keep_latest_k=0,
                last_save_model_only=False,
                numerics=numerics,
            ),
            dataloader=self.loader,
            model_parts=[torch.nn.Linear(1, 1)],
            optimizers=Part(),
            lr_schedulers=Part(),
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def train(self) -> None:
        self.manager.load()
        batches = iter(self.loader)
        while self.step < STEPS:
            self.step += 1
            numbers = [int(next(batches)[0]) for _ in range(PER_STEP)]
            self.used += numbers
            loss = 1e6 if BROKEN in numbers else 1.0 + self.step % 7 / 10
            self.metrics_processor.log(self.step, loss, loss, loss / 2)
            self.manager.save(self.step, last_step=self.step == STEPS)


def main(folder: Path) -> None:
    first = Training(folder)
    with testing.watched():
        try:
            first.train()
        except RestartNeededError:
            assert BROKEN in first.used
        else:
            raise AssertionError("the broken batch was not noticed")
    (act,) = json.loads((folder / "checkpoint/numerics.json").read_bytes())["acts"]
    begin, end = act["samples"]
    assert begin == BROKEN
    assert end - begin in (PER_STEP, 2 * PER_STEP)  # values may be looked at with the next step
    second = Training(folder)
    second.train()
    began = BROKEN // PER_STEP // EVERY * EVERY * PER_STEP
    count = STEPS * PER_STEP
    assert second.used == [*range(began, begin), *range(end, count + end - begin)]
    third = Training(folder)
    third.manager.load()
    assert (third.step, third.loader.dataset.at) == (STEPS, count + end - begin)
    kept, restored = (part.manager.states[NUMERICS].state_dict() for part in (second, third))
    assert kept == restored
    assert "distances" in kept["rank-0-of-1"]
    Training(folder / "plain", numerics=None).train()
    after = Training(folder / "plain")
    after.manager.load()
    assert after.step == STEPS


if __name__ == "__main__":
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['EVERSTEP_TEST_STORE']}", rank=0, world_size=1
    )
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
