"""How long saves hold a training up: `python -m benchmarks.frameworks.saves FOLDER NAME WAY MIB`.

Prints milliseconds as JSON: the time of each call by which the framework saves, without the first,
which allocates memory. Between two saves there is time to write the files.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

_EVERY, _SAVES, _PAUSE_S = 2, 5, 1.0
_LINEARS = 4

OWN, OWN_ASYNC, OURS, OURS_SYNC = "own", "own async", "everstep async", "everstep"
WAYS: Mapping[str, tuple[str, ...]] = {
    "lightning": (OWN, OWN_ASYNC, OURS_SYNC, OURS),
    "transformers": (OWN, OURS_SYNC),
}
"""Hugging Face's Trainer has no seam for the writing of files: ours seals what it has written."""


def model(mib: int) -> torch.nn.Sequential:
    """A model whose weights have this size."""
    wide = int((mib * 2**20 / 4 / _LINEARS) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(wide, wide) for _ in range(_LINEARS)))


class _Timed:
    """A function whose calls are measured."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.took_ms: list[float] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        began = time.monotonic()
        result = self._function(*given, **named)
        self.took_ms.append(1000 * (time.monotonic() - began))
        time.sleep(_PAUSE_S)
        return result


def lightning(folder: Path, way: str, mib: int) -> list[float]:
    """The stalls of Lightning's saves."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from trainer_sdk.integrations.lightning import (
        AsyncLightningCheckpointIO,
        LightningCallback,
        LightningCheckpointIO,
    )

    class Large(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = model(mib)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
            wide = int(self.layers[0].in_features)  # type: ignore[arg-type]
            loss: torch.Tensor = self.layers(torch.ones(1, wide)).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    plugins: dict[str, Callable[[], Any]] = {
        OWN: TorchCheckpointIO,
        OWN_ASYNC: lambda: AsyncCheckpointIO(TorchCheckpointIO()),
        OURS: AsyncLightningCheckpointIO,
        OURS_SYNC: LightningCheckpointIO,
    }
    saves = ModelCheckpoint(folder, every_n_train_steps=_EVERY, save_top_k=1)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=_EVERY * _SAVES, logger=False,
        callbacks=[saves, *([LightningCallback()] if way in {OURS, OURS_SYNC} else [])],
        plugins=[plugins[way]()], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    timed = _Timed(trainer.save_checkpoint)
    trainer.save_checkpoint = timed
    data = torch.utils.data.TensorDataset(torch.ones(1000, 1))
    trainer.fit(Large(), torch.utils.data.DataLoader(data))
    return timed.took_ms[1:]


def transformers(folder: Path, way: str, mib: int) -> list[float]:
    """The stalls of the saves of Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    from trainer_sdk.integrations.hugging_face import HuggingFaceCallback

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model(mib)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # noqa: ARG002
            wide = int(self.layers[0].in_features)  # type: ignore[arg-type]
            guess = self.layers(x[:, :1].expand(-1, wide))
            return {"loss": guess.square().mean(), "logits": guess}

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=_EVERY * _SAVES, save_steps=_EVERY, save_total_limit=1,
        per_device_train_batch_size=1, use_cpu=True, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, logging_steps=1000,
    )  # fmt: skip
    data = [{"x": torch.ones(4), "labels": torch.tensor(1.0)}] * 100
    callbacks = [HuggingFaceCallback()] if way == OURS_SYNC else []
    trainer = Trainer(model=Large(), args=arguments, train_dataset=data, callbacks=callbacks)
    timed = _Timed(trainer._maybe_log_save_evaluate)
    untimed = trainer._maybe_log_save_evaluate

    def evaluate(*given: Any, **named: Any) -> Any:
        return (timed if trainer.control.should_save else untimed)(*given, **named)

    trainer._maybe_log_save_evaluate = evaluate
    trainer.train()
    return timed.took_ms[1:]


def main(folder: Path, framework: str, way: str, mib: int) -> None:
    torch.set_num_threads(1)
    stalls = {"lightning": lightning, "transformers": transformers}[framework](folder, way, mib)
    print(json.dumps(stalls))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
