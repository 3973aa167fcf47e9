"""A small real training under DDP that saves, and goes on from what it finds.

Each loss is appended to `losses-RANK`, with its step. It ends when the file `end` is there; in the
second round, and if `wrong` is there, its loss is not a number. `PACE_S` is its wait in each step.
"""

import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_sdk
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.data import RngState


def network() -> DistributedDataParallel:
    torch.manual_seed(1)
    return DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))


def main(folder: Path, every: int, memory_every: int) -> None:
    dist.init_process_group("gloo")
    train(folder, every, memory_every)  # its model goes before the group: torch may hang otherwise
    dist.destroy_process_group()


def train(folder: Path, every: int, memory_every: int) -> None:
    rank, run, model = dist.get_rank(), trainer_sdk.session(), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(2 + rank)
    state = {"model": model, "optimizer": optimizer, "random": RngState()}
    saves = Checkpointer(folder / "saved", every=every, memory_every=memory_every)
    found = saves.restore(state)
    step, tier = (0, "") if found is None else (found.step, found.tier)
    (folder / f"restored-{run_number()}-{rank}").write_text(f"{step} {tier}")
    go_on = torch.ones(1)
    while go_on.item():
        step += 1
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        run.step()
        with (folder / f"losses-{rank}").open("a") as file:
            file.write(f"{step} {loss.item()!r}\n")
        wrong = (folder / "wrong").exists() and run_number() == 2
        saves.check_loss(math.nan if wrong else loss)
        saves.step(step, state)
        if run.should_stop:
            break
        time.sleep(float(os.environ.get("PACE_S", "0.01")))
        go_on.fill_(0.0 if (folder / "end").exists() else 1.0)
        dist.broadcast(go_on, 0)
    saves.close()


def run_number() -> int:
    return int(os.environ["EVERSTEP_ROUND"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
