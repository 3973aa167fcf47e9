"""Make a gloo group again on ranks that stay: `python -m benchmarks.in_process.group_again …`.

`FOLDER RANKS TIMES`: leaves in FOLDER/times the milliseconds of each time, of the slowest rank:
destroy the group, make it anew over the same store, make a step. No restart of ranks over gloo can
be quicker.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from benchmarks.restarts.ports import free_port
from benchmarks.restarts.steps import step
from benchmarks.restarts.train import Descent


def main(folder: Path, ranks: int, times: int) -> None:
    port = free_port()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(folder, rank, ranks, port, times)
            finally:
                os._exit(1)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _rank(folder: Path, rank: int, ranks: int, port: int, times: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    model = nn.Linear(64, 64)
    optimizer = Descent(model.parameters())
    took_ms: list[float] = []
    for number in range(times + 1):
        if number:
            dist.barrier()
        began = time.monotonic()
        if number:
            dist.destroy_process_group()
        own = PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks)
        step(model, optimizer)
        slowest = torch.tensor(1000 * (time.monotonic() - began))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        took_ms.append(float(slowest))
    if rank == 0:
        fresh = folder / "times.new"
        fresh.write_text(json.dumps(took_ms[1:]))
        fresh.rename(folder / "times")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
