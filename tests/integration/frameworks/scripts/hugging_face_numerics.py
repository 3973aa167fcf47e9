"""Trains on poisoned data with Hugging Face's Trainer: `hugging_face_numerics.py FOLDER STEPS`.

`POLICY` is what is done about an unexpected result, and `REPLICA` about replicas that differ: they
do after step `SPOILED`. Each step has `ACCUMULATED` batches.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.integration.frameworks.scripts.poisoned import FEATURES, samples
from trainer_sdk.integrations.hugging_face import HuggingFaceCallback, newest_for_all
from trainer_sdk.numerics import NumericsPolicy

BATCH = 2
EVERY = 10


class Toy(torch.nn.Module):
    """A linear model with the outputs that the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.linear(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(guess, labels), "logits": guess}


class InOrder(Trainer):  # type: ignore[misc]
    """A Trainer that takes the samples in their order."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)


class Spoiling(TrainerCallback):  # type: ignore[misc]
    """Changes a parameter of the second rank alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.process_index == 1 and str(state.global_step) == os.environ.get("SPOILED"):
            with torch.no_grad():
                model.linear.weight += 0.01


class Losses(TrainerCallback):  # type: ignore[misc]
    """Notes the loss of each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}) and os.environ.get("RANK", "0") == "0":
            with (self.folder / "losses").open("a") as file:
                file.write(f"{os.environ['EVERSTEP_ROUND']} {state.global_step} {logs['loss']!r}\n")


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    accumulated = int(os.environ.get("ACCUMULATED", "1"))
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        save_steps=EVERY,
        logging_steps=1,
        logging_nan_inf_filter=False,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulated,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    unexpected, replica = (os.environ.get(name, "observe") for name in ("POLICY", "REPLICA"))
    policy = NumericsPolicy(unexpected=unexpected, replica=replica)  # type: ignore[arg-type]
    trainer = InOrder(
        model=Toy(),
        args=arguments,
        train_dataset=samples(steps + 20, accumulated * BATCH * int(os.environ["WORLD_SIZE"])),
        callbacks=[HuggingFaceCallback(numerics=policy), Spoiling(), Losses(folder)],
    )
    start = newest_for_all(arguments.output_dir)
    print("resumes from", start)
    trainer.train(resume_from_checkpoint=start)
    print("done at", trainer.state.global_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
