"""A training that keeps a state in memory, and writes down how it came back to it.

train.py FOLDER MIB SAVED SECONDS: MIB MiB on each rank, different ones, in parameters of 32
MiB. A step takes 1 from every number, so that what was saved is known; it is saved once, after the
step SAVED. Until it restores, SECONDS seconds pass, as other parts of a training may take.
"""

import json
import os
import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.restarts import steps
from trainer_sdk.checkpoint import Checkpointer

NUMBERS = (32 << 20) // 4
_SELDOM = 1_000_000


def main(folder: Path, mib: int, saved: int, building_s: float) -> None:
    dist.init_process_group("gloo")
    saves = Checkpointer(folder / "root", every=_SELDOM, memory_every=saved)
    rank, one = dist.get_rank(), torch.ones(())
    values = [nn.Parameter(begun(rank, number)) for number in range(mib // 32)]
    optimizer = torch.optim.SGD(values, lr=1.0)
    state = {f"rank{rank}.{number}": value for number, value in enumerate(values)}
    time.sleep(building_s)
    dist.barrier()  # all ranks restore together: a rank that comes sooner waits for the others
    called_at = time.monotonic()
    found = saves.restore(state)
    back_at = time.monotonic()
    for step in count(1 if found is None else found.step + 1):
        for value in values:
            value.grad = one.expand_as(value)  # a gradient that takes no memory
        optimizer.step()
        life = torch.tensor([os.getpid()])
        dist.broadcast(life, 0)
        if found is None and step <= saved:
            saves.step(step, state)
        if step == saved + 1:
            steps.mark(folder, int(life))
            if found is not None:
                note: dict[str, object] = {
                    "rank": rank,
                    "called_at": called_at,
                    "back_at": back_at,
                    "step": found.step,
                    "tier": found.tier,
                    "is_equal": all(
                        torch.equal(value, begun(rank, number) - step)
                        for number, value in enumerate(values)
                    ),
                }
                write(folder / f"back-{rank}", note)
        time.sleep(steps.PACE_S)


def begun(rank: int, number: int) -> torch.Tensor:
    """What a parameter is before the first step: no two begin alike, and no float is rounded."""
    first = 1000 * rank + number
    return torch.arange(first, first + NUMBERS, dtype=torch.float32)


def write(path: Path, note: dict[str, object]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(note))
    fresh.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
