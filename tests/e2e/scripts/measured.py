"""A training with gloo in which one rank is late, by its arguments: unmodified, or with sections.

    measured.py FOLDER plain|sections LATE_RANK LATE_S

It ends when the file `end` is in the folder.
"""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainer_sdk


def main(folder: Path, kind: str, late_rank: int, late_s: float) -> None:
    dist.init_process_group("gloo")
    train(folder, kind == "sections", late_s if dist.get_rank() == late_rank else 0.0)
    dist.destroy_process_group()


def train(folder: Path, has_sections: bool, late_s: float) -> None:
    run = trainer_sdk.session() if has_sections else None
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    go_on = torch.ones(1)
    while go_on.item():
        with run.section("data") if run else nullcontext():
            time.sleep(0.02 + late_s)
        with run.section("forward") if run else nullcontext():
            loss = model(torch.ones(4, 8)).square().mean()
        with run.section("backward") if run else nullcontext():
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if run:
            run.step()
        go_on.fill_(0.0 if (folder / "end").exists() else 1.0)
        dist.broadcast(go_on, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
