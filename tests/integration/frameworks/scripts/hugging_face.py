"""Trains a toy with Hugging Face's Trainer: `hugging_face.py FOLDER STEPS…`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integration.frameworks.scripts.step_log import damage_newest, note_step
from trainer_sdk.integrations.hugging_face import HuggingFaceCallback, newest_for_all

DROPOUT = float(os.environ.get("DROPOUT", "0"))


class Toy(torch.nn.Module):
    """A linear model with the outputs that the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)
        self.dropout = torch.nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.linear(self.dropout(x)).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(guess, labels), "logits": guess}


class StepLog(TrainerCallback):  # type: ignore[misc]
    """Notes each finished step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        note_step(self.folder, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            print(f"loss {state.global_step} {logs['loss']!r} {logs.get('grad_norm')!r}")


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    data = [
        {"x": torch.full((4,), float(one % 7)), "labels": torch.tensor(1.0)} for one in range(640)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        save_steps=5,
        save_total_limit=3,
        logging_steps=1 if DROPOUT else 5,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        use_cpu=True,
        ddp_backend="gloo" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    is_plain = bool(os.environ.get("PLAIN"))
    callbacks = [] if is_plain else [HuggingFaceCallback(), StepLog(folder)]
    trainer = Trainer(model=Toy(), args=arguments, train_dataset=data, callbacks=callbacks)
    start = None if is_plain else newest_for_all(arguments.output_dir)
    print("resumes from", start)
    trainer.train(resume_from_checkpoint=start)
    print("done at", trainer.state.global_step)


if __name__ == "__main__":
    for number, count in enumerate(sys.argv[2:]):
        if number and not os.environ.get("UNDAMAGED"):
            damage_newest(Path(sys.argv[1]))
        main(Path(sys.argv[1]), int(count))
