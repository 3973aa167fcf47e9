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
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = DistributedDataParallel(model)
    step, saves = 0, None
    if not os.environ.get("PLAIN"):
        import trainer_sdk

        saves = trainer_sdk.Checkpointer(folder / "checkpoints", every=EVERY)
        run, state = trainer_sdk.session(), {"model": model, "optimizer": optimizer}
        restored = saves.restore(state)
        step = restored.step if restored else 0
    print("resumes from", step)
    while step < steps:
        optimizer.zero_grad()
        parallel(torch.full((2, 4), float(step % 7))).square().mean().backward()
        optimizer.step()
        step += 1
        if saves is not None:
            run.step(step)
        note_step(folder, step)
        if saves is not None:
            saves.step(step, state)
            if run.should_stop:
                break
    if saves is not None:
        saves.close()
    print("done at", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
