"""A sharded training that survives the loss of ranks: `surviving_sharded.py KIND FOLDER FAILURE…`.

`hsdp` has two replicas of two shards. `fsdp` has each shard once, and its images in memory.
Each failure `ROUND:RANK:STEP` kills a rank in that step. Each rank appends its losses to
`losses-RANK`, with the step and its process.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainer_sdk
from trainer_sdk.checkpoint import Checkpointer, PositionedSampler

STEPS, EVERY = 24, 2
SHAPES = {"hsdp": (2, 2), "fsdp": (4,)}
run = trainer_sdk.session()
kind, folder = sys.argv[1], Path(sys.argv[2])
DATA = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))


def build() -> dict[str, Any]:
    mesh = init_device_mesh(
        "cpu", SHAPES[kind], mesh_dim_names=("copies", "shards")[-len(SHAPES[kind]) :]
    )
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 5))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "data": PositionedSampler(512, batch_size=8),
    }


def fail_if_due(step: int) -> None:
    place = (os.environ.get("EVERSTEP_ROUND"), str(dist.get_rank()), str(step))
    if ":".join(map(str, place)) in sys.argv[3:]:
        os.kill(os.getpid(), signal.SIGKILL)


images = partial(Checkpointer, folder / "saved", job="sharded", every=EVERY)


@run.survive(build, checkpointer=images if kind == "fsdp" else None)
def train(state: dict[str, Any], step: int, saves: Checkpointer | None = None) -> None:
    model, optimizer, data = (state[name] for name in ("model", "optimizer", "data"))
    for batch in data.counted(data):
        fail_if_due(step + 1)
        loss = model(DATA[batch]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with (folder / f"losses-{dist.get_rank()}").open("a") as file:
            file.write(f"{step + 1} {loss.item().hex()} {os.getpid()}\n")
        step = run.step()
        if saves is not None:
            saves.step(step, state)
        if step == STEPS:
            break
    parts = [parameter.to_local().detach().flatten() for parameter in model.parameters()]
    (folder / f"model-{dist.get_rank()}").write_bytes(torch.cat(parts).numpy().tobytes())


train()
