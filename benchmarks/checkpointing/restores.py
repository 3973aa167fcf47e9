"""Restores from the memory of the node, next to a copy of as many bytes."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpointing.contenders import State
from trainer_sdk.checkpoint import Checkpointer

JOB = "bench-restore"


def restored(folder: Path, state: State, rounds: int) -> dict[str, list[float]]:
    """Milliseconds. Images are checked while a training is built: here, before it is timed."""
    found: dict[str, list[float]] = {"copy": [], "restore": [], "checked": []}
    live = {key: torch.ones_like(value.detach()) for key, value in state.items()}
    for number in range(1, rounds + 2):
        first = Checkpointer(folder / "back", keep_memory=True, job=JOB)
        first.save(number, state, to_root=False, wait=True)
        first._ending.leave(True)  # noqa: FBT003
        began = time.perf_counter()
        second = Checkpointer(folder / "back", keep_memory=True, job=JOB)
        ahead = second._restorer._early
        assert ahead is not None
        ahead._thread.join()
        checked = time.perf_counter()
        dist.barrier()  # ranks that copy alone have the memory for themselves
        alone = time.perf_counter()
        for key, value in state.items():
            live[key].copy_(value.detach())
        copied = time.perf_counter()
        for value in live.values():
            value.zero_()
        dist.barrier()
        zeroed = time.perf_counter()
        back = second.restore(live)
        ended = time.perf_counter()
        assert back is not None
        assert (back.step, back.tier) == (number, "memory")
        second.close()
        if number > 1:  # the first copy meets memory that nobody has touched
            found["checked"].append((checked - began) * 1e3)
            found["copy"].append((copied - alone) * 1e3)
            found["restore"].append((ended - zeroed) * 1e3)
    assert all(torch.equal(live[key], value) for key, value in state.items())
    return found
