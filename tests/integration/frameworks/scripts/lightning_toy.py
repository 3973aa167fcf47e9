"""Trains a toy with Lightning: `lightning_toy.py FOLDER STEPS…`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.integration.frameworks.scripts.step_log import damage_newest, note_step
from trainer_sdk.integrations.lightning import (
    AsyncLightningCheckpointIO,
    LightningCallback,
    newest_for_all,
)

EVERY = 5


class Toy(LightningModule):  # type: ignore[misc]
    """A linear model; its weight counts the steps, so that a test sees which state is loaded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("counted", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.counted += 1
        loss: torch.Tensor = self.linear(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class StepLog(Callback):  # type: ignore[misc]
    """Notes each finished step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        assert int(pl_module.counted) == trainer.global_step
        note_step(self.folder, trainer.global_step)


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    alone = os.environ["RANK"] if os.environ.get("DEVICES") else ""
    checkpoints = folder / f"checkpoints{alone}"
    local = int(os.environ.get("LOCAL_EVERY", "0"))
    is_plain = bool(os.environ.get("PLAIN"))
    own = LightningCallback(local_every_n_train_steps=local)
    saves = ModelCheckpoint(
        checkpoints, every_n_train_steps=EVERY, save_top_k=2, monitor="step", mode="max"
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("DEVICES") or os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=steps,
        callbacks=[saves] if is_plain else [own, StepLog(folder), saves],
        plugins=[] if is_plain else [AsyncLightningCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.TensorDataset(torch.ones(4000, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    start = None if is_plain else newest_for_all(checkpoints)
    print("resumes from", start)
    trainer.fit(Toy(), loader, ckpt_path=start)
    print("done at", trainer.global_step)


if __name__ == "__main__":
    for number, count in enumerate(sys.argv[2:]):
        if number and not os.environ.get("UNDAMAGED"):
            damage_newest(Path(sys.argv[1]))
        main(Path(sys.argv[1]), int(count))
