"""Trains a toy with an `Accelerator`: `accelerate_toy.py FOLDER STEPS…`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from tests.integration.frameworks.scripts.step_log import damage_newest, note_step
from trainer_sdk.integrations.accelerate import AccelerateRun

EVERY = 5


def plain(accelerator: Any, model: Any, optimizer: Any, steps: int) -> None:
    """The training without Everstep."""
    for _ in range(steps):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
    accelerator.end_training()


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    if os.environ.get("PLAIN"):
        plain(accelerator, model, optimizer, steps)
        return
    everstep = AccelerateRun(accelerator, folder / "checkpoints", total_steps=steps)
    step = everstep.resume()
    print("resumes from", step)
    while step < steps:
        optimizer.zero_grad()
        accelerator.backward(model(torch.full((2, 4), float(step % 7))).square().mean())
        optimizer.step()
        step = everstep.step()
        note_step(folder, step)
        if step % EVERY == 0 or everstep.should_stop or everstep.should_save:
            everstep.save()
        if everstep.should_stop:
            break
    everstep.close()
    print("done at", step)


if __name__ == "__main__":
    for number, count in enumerate(sys.argv[2:]):
        if number:
            damage_newest(Path(sys.argv[1]))
        main(Path(sys.argv[1]), int(count))
