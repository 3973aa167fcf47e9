"""A training that knows nothing of Everstep: one step of an optimizer, then collectives only.

It evaluates until the file `end` is there, and makes the file `evaluating` when it has done so for
the seconds in its arguments. When the file `hang` is there, rank 1 of the first
round hangs before the next collective, and the other rank waits for it in that.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def main(folder: Path, long_s: float) -> None:
    dist.init_process_group("gloo")
    make_a_step()
    evaluate(folder, long_s)
    dist.destroy_process_group()


def make_a_step() -> None:
    # The model goes before its process group: the other way torch 2.13 joins a thread of the group
    # that waits for the interpreter's lock, which it holds itself.
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()


def evaluate(folder: Path, long_s: float) -> None:
    rank, is_first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    asked, long_at = torch.zeros(2), time.monotonic() + long_s
    while not asked[0]:
        time.sleep(0.02)
        asked.copy_(torch.tensor([(folder / name).exists() for name in ("end", "hang")]))
        dist.broadcast(asked, 0)
        if time.monotonic() > long_at:
            (folder / "evaluating").touch()
        if asked[1] and is_first and rank == 1:
            forget_the_others()


def forget_the_others() -> None:
    time.sleep(1000)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
