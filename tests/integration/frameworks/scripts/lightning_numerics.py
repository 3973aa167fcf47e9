"""Trains on poisoned data with Lightning: `lightning_numerics.py FOLDER STEPS`.

`POLICY` is what is done about an unexpected result, and `REPLICA` about replicas that differ: they
do after step `SPOILED`. With `SHARDED`, each rank has a part of the parameters.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from tests.integration.frameworks.scripts.poisoned import FEATURES, samples
from trainer_sdk.integrations.lightning import (
    AsyncLightningCheckpointIO,
    LightningCallback,
    newest_for_all,
)
from trainer_sdk.numerics import NumericsPolicy

BATCH = 2
EVERY = 10


class Toy(LightningModule):  # type: ignore[misc]
    """A linear model that logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        guess = self.linear(batch["x"]).squeeze(-1)
        loss = torch.nn.functional.mse_loss(guess, batch["labels"])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [torch.linalg.vector_norm(parameter.grad) for parameter in self.parameters()]
        self.log("grad_norm", torch.linalg.vector_norm(torch.stack(norms)))

    def configure_model(self) -> None:
        if "SHARDED" in os.environ:
            fully_shard(self.linear, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Spoiling(Callback):  # type: ignore[misc]
    """Changes a parameter of the second rank alone."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and str(trainer.global_step) == os.environ.get("SPOILED"):
            with torch.no_grad():
                pl_module.linear.weight += 0.01


class Losses(Callback):  # type: ignore[misc]
    """Notes the loss of each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["loss"])
            with (self.folder / "losses").open("a") as file:
                file.write(f"{os.environ['EVERSTEP_ROUND']} {trainer.global_step} {loss!r}\n")


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    unexpected, replica = (os.environ.get(name, "observe") for name in ("POLICY", "REPLICA"))
    policy = NumericsPolicy(unexpected=unexpected, replica=replica)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(save_distributed_checkpoint=False)
        if "SHARDED" in os.environ
        else "auto",
        max_steps=steps,
        callbacks=[
            LightningCallback(numerics=policy, dirpath=folder / "checkpoints"),
            Spoiling(),
            Losses(folder),
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=EVERY, save_top_k=-1),
        ],
        plugins=[AsyncLightningCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data: Any = samples(steps + 20, BATCH * ranks)
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, ranks, int(os.environ["RANK"]), shuffle=False
    )
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    start = newest_for_all(folder / "checkpoints")
    print("resumes from", start)
    trainer.fit(Toy(), loader, ckpt_path=start)
    print("done at", trainer.global_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
