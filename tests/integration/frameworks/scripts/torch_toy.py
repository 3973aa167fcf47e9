"""Trains a toy with plain torch and a `Checkpointer`: `torch_toy.py FOLDER STEPS`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.integration.frameworks.scripts.step_log import note_step

EVERY = 5


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    # Its model goes before the process group: otherwise torch may hang.
    (plain if os.environ.get("PLAIN") else saved)(*toy(), steps, folder)
    dist.destroy_process_group()


def toy() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    return DistributedDataParallel(model), optimizer


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 4), float(step % 7))).square().mean().backward()
    optimizer.step()


def plain(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int, _: Path
) -> None:
    """The training without Everstep."""
    for step in range(steps):
        train(model, optimizer, step)


def saved(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int, folder: Path
) -> None:
    import trainer_sdk

    saves = trainer_sdk.Checkpointer(folder / "checkpoints", every=EVERY, in_flight=3)
    run, state = trainer_sdk.session(), {"model": model.module, "optimizer": optimizer}
    restored = saves.restore(state)
    step = restored.step if restored else 0
    run.start_at(step, total=steps)
    while step < steps:
        train(model, optimizer, step)
        step = run.step()
        note_step(folder, step)
        saves.step(step, state)
        if run.should_stop:
            break
    saves.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
