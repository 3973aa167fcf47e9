"""Rank 0 survives the loss of another rank again and again: `leaking.py FOLDER SHAPE ROUNDS`.

At the begin of each round it appends to `figures` what it, its agent and its warden use.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainer_sdk

run = trainer_sdk.session()
folder, shape, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_NAMES = {"agent.ranks.warden": "warden", "everstep_services.cli": "agent"}


def build() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    if shape == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
        fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def used_by(process: psutil.Process) -> dict[str, int]:
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "memory": process.memory_full_info().uss,
    }


def tell() -> None:
    own = psutil.Process()
    used = {"rank": used_by(own)}
    for process in own.parents():
        command = " ".join(process.cmdline())
        for part, name in _NAMES.items():
            if part in command and name not in used:
                used[name] = used_by(process)
    used["node"] = {"shared": len(os.listdir("/dev/shm"))}
    with (folder / "figures").open("a") as file:
        file.write(json.dumps(used) + "\n")


@run.survive(build)
def train(state: dict[str, Any], step: int) -> None:
    number = int(os.environ["EVERSTEP_ROUND"])
    if not rank:
        tell()
    model, optimizer = state["model"], state["optimizer"]
    parallel = DistributedDataParallel(model) if shape == "ddp" else model
    for _ in range(3):
        optimizer.zero_grad()
        parallel(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        run.step()
        if number <= rounds and rank == 1 + number % (world - 1):
            os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
train()
