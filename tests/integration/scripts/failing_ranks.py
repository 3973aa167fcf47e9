"""Ranks of gloo under torchrun: one of them raises, or is killed, at its third step."""

import os
import signal
import sys

import torch
import torch.distributed as dist

from trainer_sdk.bootstrap.torch_exit import wait_at_exit


def main(fault: str, culprit: int) -> None:
    wait_at_exit()
    dist.init_process_group("gloo")
    for step in range(1, 6):
        if step == 3 and dist.get_rank() == culprit:
            fail(fault)
        dist.all_reduce(torch.ones(4))


def fail(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    raise KeyError("tokens")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
