"""A gloo training whose ranks write on both streams; rank 1 fails once; it ends on a file `end`."""

import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, fails: bool) -> None:
    dist.init_process_group("gloo")
    rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log = logging.getLogger("training")
    logging.basicConfig(format="%(asctime)s %(message)s")
    sys.stdout.buffer.write(b"broken \xff bytes\n")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    go_on, step = torch.ones(1), 0
    while go_on.item():
        step += 1
        dist.all_reduce(torch.ones(10))
        optimizer.step()
        print(f"restart {restart} rank {rank} step {step}")
        if step % 5 == 0:
            log.warning("rank %d has warned at %d", rank, step)
        if fails and restart == 0 and step == 10 and rank == 1:
            raise ValueError("the root cause")
        time.sleep(0.02)
        go_on.fill_(0.0 if (folder / "end").exists() else 1.0)
        dist.broadcast(go_on, 0)
    print(f"last words of rank {rank}", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), fails="fails" in sys.argv)
