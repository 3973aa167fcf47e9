"""A training with torch that knows nothing of Everstep; it ends when the file `end` is there.

The rank whose file `raise-RESTART-RANK` is there raises, and leaves its group before that is known.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    try:
        train(folder)
    finally:
        dist.destroy_process_group()
        time.sleep(0.1)  # as it takes to close what else a training has open


def train(folder: Path) -> None:
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    raises = folder / f"raise-{restart}-{dist.get_rank()}"
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    go_on = torch.ones(1)
    while go_on.item():
        loss = model(torch.ones(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if raises.exists():
            raise ValueError("the root cause")
        time.sleep(0.02)
        go_on.fill_(0.0 if (folder / "end").exists() else 1.0)
        dist.broadcast(go_on, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
