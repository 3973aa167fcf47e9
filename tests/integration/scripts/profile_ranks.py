"""Train a small model in processes of its own, each with torch.profiler; one is slow on request.

Arguments: rank, number of ranks, port, folder, slow rank, where (`data`, `forward` or `none`).
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from trainer_sdk.bootstrap.torch_exit import wait_at_exit

STEPS = 8
DELAY_S = 0.15


def main() -> None:
    rank, ranks, port = map(int, sys.argv[1:4])
    folder, slow, where = Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6]

    def delay(here: str) -> None:
        if (rank, where) == (slow, here):
            time.sleep(DELAY_S)

    torch.set_num_threads(1)
    wait_at_exit()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=STEPS),
        on_trace_ready=lambda done: done.export_chrome_trace(str(folder / f"rank{rank}.json")),
    ) as profiler:
        for _ in range(STEPS + 2):
            with record_function("DataLoader"):
                delay("data")
                batch = torch.randn(16, 64)
            with record_function("forward"):
                delay("forward")
                loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    del model  # before its group: otherwise torch may hang
    dist.destroy_process_group()


main()
