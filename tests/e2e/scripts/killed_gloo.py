"""A gloo training in which another rank kills itself in each round, a number of times."""

import os
import signal
import sys

import torch
import torch.distributed as dist


def main(kills: int) -> None:
    dist.init_process_group("gloo")
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    victim = (restart + 1) % dist.get_world_size()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    for step in range(1, 20):
        dist.all_reduce(torch.ones(1000))
        optimizer.step()
        if restart < kills and step == 10 + restart % 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
