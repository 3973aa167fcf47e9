"""Trains a toy with DeepSpeed on the CPU: `deepspeed_toy.py FOLDER STEPS…`."""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

from tests.integration.frameworks.scripts.step_log import damage_newest, note_step
from trainer_sdk.integrations.deepspeed import DeepSpeedRun

SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def plain(engine: Any, steps: int) -> None:
    """The training without Everstep."""
    while engine.global_steps < steps:
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=SETTINGS
    )
    if os.environ.get("PLAIN"):
        plain(engine, steps)
        return
    everstep = DeepSpeedRun(engine, folder / "checkpoints", total_steps=steps)
    client_state = everstep.resume()
    print("resumes from", engine.global_steps, client_state.get("seen", 0))
    while engine.global_steps < steps:
        engine.backward(engine(torch.full((2, 4), float(engine.global_steps % 7))).square().mean())
        engine.step()
        client_state["seen"] = client_state.get("seen", 0) + 2
        note_step(folder, engine.global_steps)
        if everstep.step(client_state, save_every=5):
            break
    everstep.close()
    print("done at", engine.global_steps, client_state["seen"])
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    for number, count in enumerate(sys.argv[2:]):
        if number:
            damage_newest(Path(sys.argv[1]))
        main(Path(sys.argv[1]), int(count))
