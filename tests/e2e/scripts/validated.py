"""Trains on DDP, and validates results, until the file `end` is there: `validated.py FOLDER`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainer_sdk

dist.init_process_group("gloo")
torch.use_deterministic_algorithms(mode=True)
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = trainer_sdk.session()
batches = (torch.randn(4, 8) for _ in iter(int, 1))
state = {"model": model, "optimizer": optimizer}
numerics = run.numerics(state, batches, mode="validate_results")


def compute(batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


for batch in numerics:
    loss = numerics.compute(compute, batch)
    if numerics.accepts(loss=loss):
        optimizer.step()
    optimizer.zero_grad()
    run.step()
    over = torch.tensor([(Path(sys.argv[1]) / "end").exists()], dtype=torch.int)
    dist.broadcast(over, 0)
    if over.item():
        break
dist.destroy_process_group()
