"""What every training here does: steps over gloo, of a model for which torch alone is needed.

Each rank leaves one mark for each of its lives: when it had finished its first step, on the clock
that all processes of a machine share. No launcher takes part in that measure.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

PACE_S = 0.02
_MOST_PIDS = 1 << 22


class Stepping(Protocol):
    """What changes the parameters by their gradients."""

    def step(self) -> object: ...


def train(arguments: list[str], made_for: Callable[[nn.Module], Stepping]) -> None:
    """Make steps for ever, or `rest` after the first."""
    folder, rests = Path(arguments[0]), "rest" in arguments[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(64, 64)
    step_for_ever(folder, model, made_for(model), lambda: None, rests=rests)


def step_for_ever(
    folder: Path,
    model: nn.Module,
    optimizer: Stepping,
    finished: Callable[[], object],
    *,
    rests: bool,
) -> None:
    """Make steps, and leave the mark after the first; `finished` is called after each."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    life = torch.tensor([os.getpid() + restarts * _MOST_PIDS])  # rank 0 may have survived
    step(model, optimizer)
    dist.broadcast(life, 0)
    mark(folder, int(life))
    finished()
    while rests:
        time.sleep(86_400)
    while True:
        step(model, optimizer)
        finished()
        time.sleep(PACE_S)


def step(model: nn.Module, optimizer: Stepping) -> None:
    model(torch.ones(16, 64)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def mark(folder: Path, life: int) -> None:
    """All ranks of one life of the training share `life`, by the process of its rank 0."""
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
