"""Trainings of real frameworks on a single rank, in the process of the test."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from trainer_sdk.numerics import NumericsPolicy

EPOCH = 11
"""Batches of an epoch, of one sample each."""


class Toy(torch.nn.Module):
    """Notes the samples it is given."""

    def __init__(self, used: list[int]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.used = used

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.used.extend(int(value) for value in x.flatten())
        return {"loss": (self.linear(x) - labels).square().mean()}


def train_with_hugging_face(
    folder: Path,
    steps: int,
    used: list[int],
    accumulated: int = 1,
    *,
    scale: float = 1.0,
) -> None:
    transformers = pytest.importorskip("transformers")
    from trainer_sdk.integrations.hugging_face import HuggingFaceCallback, newest_for_all

    class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(train_dataset or self.train_dataset)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        gradient_accumulation_steps=accumulated,
        per_device_train_batch_size=1,
        learning_rate=1e-5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"x": torch.tensor([at * scale]), "labels": torch.zeros(1)} for at in range(EPOCH)]
    callback = HuggingFaceCallback(numerics=NumericsPolicy())
    trainer = InOrder(model=Toy(used), args=arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=newest_for_all(folder))
    assert trainer.state.global_step == steps


def train_with_lightning(
    folder: Path,
    steps: int,
    used: list[int],
    accumulated: int = 1,
    *,
    scale: float = 1.0,
    validated: list[int] | None = None,
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from trainer_sdk.integrations.lightning import (
        LightningCallback,
        LightningCheckpointIO,
        newest_for_all,
    )

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.toy = Toy(used)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.toy(batch, torch.zeros(1))["loss"]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if validated is not None:
                validated.append(self.trainer.global_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-5)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulated,
        callbacks=[
            LightningCallback(numerics=NumericsPolicy(), dirpath=folder),
            lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1),
        ],
        plugins=[LightningCheckpointIO()],
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = [torch.tensor([at * scale]) for at in range(EPOCH)]
    others = None if validated is None else DataLoader(data[:1])
    start = newest_for_all(folder)
    trainer.fit(Module(), DataLoader(data, batch_size=1), others, ckpt_path=start)
    assert trainer.global_step == steps


TRAININGS: Mapping[str, Callable[..., None]] = {
    "transformers": train_with_hugging_face,
    "lightning": train_with_lightning,
}
