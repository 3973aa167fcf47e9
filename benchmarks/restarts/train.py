"""The training that every launcher restarts: torch is its only heavy import.

Each rank leaves one mark for each of its lives: when it had finished its first step, on the clock
that all processes of a machine share. No launcher takes part in that measure.

    torchrun --nproc-per-node 2 train.py FOLDER [own|torch|rest]

The last word: with an optimizer of its own, with one of torch's, or asleep after one step.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PACE_S = 0.02


class Descent(torch.optim.Optimizer):
    """Plain gradient descent. torch's own optimizers import torch._dynamo, as much as torch."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append({"params": list(param_group["params"])})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None


def main(folder: Path, kind: str = "own") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(64, 64)
    optimizer = (
        torch.optim.SGD(model.parameters()) if kind == "torch" else Descent(model.parameters())
    )
    life = torch.tensor([os.getpid()])
    step(model, optimizer)
    dist.broadcast(life, 0)
    mark(folder, int(life))
    while kind == "rest":
        time.sleep(86_400)
    while True:
        step(model, optimizer)
        time.sleep(PACE_S)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(16, 64)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def mark(folder: Path, life: int) -> None:
    """All ranks of one life of the training share `life`: the pid of its rank 0."""
    rank = dist.get_rank()
    body = {
        "at": time.monotonic(),
        "life": life,
        "rank": rank,
        "world": dist.get_world_size(),
        "pid": os.getpid(),
        "node": os.environ.get("BENCH_NODE", ""),
    }
    fresh = folder / f"{life}.{rank}.new"
    fresh.write_text(json.dumps(body))
    fresh.rename(folder / f"{life}.{rank}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
