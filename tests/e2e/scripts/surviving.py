"""A training under DDP that survives the loss of ranks, and has to have the same losses as without.

Each of its arguments `ROUND:KIND:RANK:STEP` ends a rank in that step. Each rank appends its losses
to `losses-RANK`, with the step and its process. With the argument `saves` it has a checkpointer.
"""

import os
import signal
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
from trainer_sdk.checkpoint import Checkpointer, PositionedSampler

STEPS = 30
run = trainer_sdk.session()
folder = Path(sys.argv[1])
failures = [argument.split(":") for argument in sys.argv[2:] if ":" in argument]


def build() -> dict[str, Any]:
    layers = (nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        "data": PositionedSampler(512, batch_size=8),
    }


def fail(kind: str) -> None:
    match kind:
        case "kill" | "late":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("an error of the script")
        case "hang":
            time.sleep(1000)
        case _:
            raise AssertionError(kind)


def fail_if_due(step: int, *, is_late: bool) -> None:
    """As the arguments have it: before the step, or `late`, when its optimizer has stepped."""
    now = (os.environ.get("EVERSTEP_ROUND"), str(dist.get_rank()), str(step))
    for number, kind, *place in failures:
        if (number, *place) == now and is_late == (kind == "late"):
            fail(kind)


def saves() -> Checkpointer:
    return Checkpointer(folder / "checkpoints", every=1000)


@run.survive(build, checkpointer=saves if "saves" in sys.argv else None)
def train(state: dict[str, Any], step: int, *_: Checkpointer) -> None:
    model, optimizer, data = (state[name] for name in ("model", "optimizer", "data"))
    rank = dist.get_rank()
    # By default the first step of each has other buckets, and so another order of summation.
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    samples = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(samples), batch_sampler=data)
    for (batch,) in data.counted(loader):
        with run.section("data"):
            fail_if_due(step + 1, is_late=False)
            time.sleep(0.02)  # others stop later than a rank that hangs here
        loss = parallel(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        fail_if_due(step + 1, is_late=True)
        state["schedule"].step()
        with (folder / f"losses-{rank}").open("a") as file:
            file.write(f"{step + 1} {loss.item().hex()} {os.getpid()}\n")
        step = run.step()
        if step == STEPS:
            break
    last = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    (folder / f"model-{rank}").write_bytes(last.numpy().tobytes())


train()
