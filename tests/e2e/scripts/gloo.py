"""A training with torch that knows nothing of Everstep; it ends when the file `end` is there.

The rank whose file `raise-RESTART-RANK` is there leaves its group, and raises after that.
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
    is_good = train(folder)
    dist.destroy_process_group()
    if not is_good:
        time.sleep(0.15)  # as it takes to write down what was wrong
        raise ValueError("the root cause")


def train(folder: Path) -> bool:
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
            return False
        time.sleep(0.02)
        go_on.fill_(0.0 if (folder / "end").exists() else 1.0)
        dist.broadcast(go_on, 0)
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
