"""torchtitan's checkpoint manager and loader on data with a batch that breaks the loss.

`titan_numerics.py FOLDER`, on one rank or on several replicas; the last one has the broken batch.
"""

import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader

from tests.integration.frameworks.scripts.titan import Part
from trainer_sdk import testing
from trainer_sdk.integrations.torchtitan import TitanCheckpointManager
from trainer_sdk.integrations.torchtitan_numerics import NUMERICS
from trainer_sdk.numerics import NumericsPolicy
from trainer_sdk.numerics import rollback as rollback_acts
from trainer_sdk.numerics.replica_hash import local_part
from trainer_sdk.numerics.rollback import RestartNeededError
from trainer_sdk.wire import NumericsReported

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

    def __init__(
        self, folder: Path, numerics: NumericsPolicy | None = SKIP, broken: float = 1e6
    ) -> None:
        super().__init__()
        self.broken, self.kept = broken, 0.0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.metrics_processor = Metrics()
        self.used: list[int] = []
        self.loader = ParallelAwareDataloader(Counting(), self.rank, self.world, batch_size=1)
        self.model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        if self.world > 1:
            replicate(self.model, mesh=init_device_mesh("cpu", (self.world,)))
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
            model_parts=[self.model],
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
            self.train_step(batches)
            self.manager.save(self.step, last_step=self.step == STEPS)

    def train_step(self, batches: Iterator[Any]) -> None:
        numbers = [int(next(batches)[0]) for _ in range(PER_STEP)]
        self.used += numbers
        is_broken = BROKEN in numbers and self.rank == self.world - 1
        own = torch.tensor(self.broken if is_broken else 1.0 + self.step % 7 / 10)
        dist.all_reduce(own)
        loss = self.kept + float(own / self.world)
        if not math.isfinite(loss):
            self.kept = loss  # it has spoiled the parameters
            raise RuntimeError(
                f"Loss is not finite (global_avg_loss={loss}) at step {self.step}. "
                "Stopping training."
            )
        self.metrics_processor.log(self.step, loss, loss, loss / 2)

    @torch.no_grad()
    def spoil(self) -> None:
        """Change a parameter of the last rank alone."""
        if self.rank == self.world - 1:
            local_part(self.model.weight).add_(1.0)


def goes_back(folder: Path, broken: float) -> None:
    first = Training(folder, broken=broken)
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
    assert "distances" in kept[f"rank-{second.rank}-of-{second.world}"]


def ends_as_without_us(folder: Path, policy: NumericsPolicy, steps: int) -> None:
    """A loss that is not finite ends the training: nothing is done about it, or nothing can be."""
    training = Training(folder, policy, broken=float("nan"))
    try:
        training.train()
    except RuntimeError as error:
        assert "Loss is not finite" in str(error)
    assert training.step == BROKEN // PER_STEP + 1 + steps


def goes_on_from_a_checkpoint_without_statistics(folder: Path) -> None:
    Training(folder, numerics=None).train()
    after = Training(folder)
    after.manager.load()
    assert after.step == STEPS


def names_replicas_that_differ(folder: Path) -> None:
    with testing.watched(dist.get_rank()) as watch:
        training = Training(folder, NumericsPolicy())
        training.spoil()
        training.train()
    events = [message for message in watch.messages if isinstance(message, NumericsReported)]
    judged = [event.body for event in events if event.event == "judged"]
    expected = [("replica_differs", STEPS, [0, 1], "weight")] if not training.rank else []
    assert [(it["kind"], it["step"], it["ranks"], it["group"]) for it in judged] == expected


def main(folder: Path) -> None:
    rollback_acts._ENDED_WITHIN_S = 0.0  # no agent ends the ranks
    trainer = importlib.util.find_spec("torchtitan.trainer")
    assert trainer is not None
    assert trainer.origin is not None
    assert '"Loss is not finite (global_avg_loss={' in Path(trainer.origin).read_text()
    for name, broken in (("spike", 1e6), ("nan", float("nan"))):
        goes_back(folder / name, broken)
    ends_as_without_us(folder / "observed", NumericsPolicy(), 0)
    ends_as_without_us(folder / "refused", NumericsPolicy(unexpected="skip", budget=0), 2)
    goes_on_from_a_checkpoint_without_statistics(folder / "plain")
    if dist.get_world_size() > 1:
        names_replicas_that_differ(folder / "differ")


if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['EVERSTEP_TEST_STORE']}",
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
