"""Trains with the same global batch on any number of ranks, until `end` is in the folder.

Each rank appends to `steps-NODE` a line for each step: step, process, rank, world size, time, and
its samples; at the end its weights to `weights-NODE`.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainer_sdk
from trainer_sdk.checkpoint import PositionedSampler

GLOBAL_BATCH, SIZE = 12, 120_000
run = trainer_sdk.session()
folder, node = Path(sys.argv[1]), os.environ["EVERSTEP_NODE"]


def build() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "data": PositionedSampler(SIZE, batch_size=1, seed=5),
    }


@run.survive(build)
def train(state: dict[str, Any], step: int) -> None:
    share = run.share(GLOBAL_BATCH, at_most=4)
    state["data"].divide(share)
    parallel = DistributedDataParallel(state["model"])
    inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(inputs, torch.arange(SIZE))
    batches = state["data"].counted(DataLoader(data, batch_sampler=state["data"]))
    is_over = torch.zeros(1)
    while not is_over:
        is_over += (folder / "end").exists()
        dist.all_reduce(is_over)
        samples: list[int] = []
        for micro, (values, numbers) in zip(share, batches, strict=False):
            with contextlib.nullcontext() if micro.is_last else parallel.no_sync():
                loss = (parallel(values) - values.sum(1, keepdim=True)).square().mean()
                (loss * micro.weight).backward()
            samples += numbers.tolist() if micro.weight else []
        time.sleep(0.02)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        own = (os.getpid(), dist.get_rank(), dist.get_world_size(), time.time(), *samples)
        with (folder / f"steps-{node}").open("a") as file:
            file.write(" ".join(map(str, (step + 1, *own))) + "\n")
        step = run.step()
    weights = [each.flatten().tolist() for each in state["model"].parameters()]
    (folder / f"weights-{node}").write_text(str(weights))


train()
