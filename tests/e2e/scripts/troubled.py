"""Four ranks that train over gloo, until one of them does what the first argument says."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import trainer_sdk

FAULT, CULPRIT, AT = sys.argv[1], int(sys.argv[2]), 4


def train(run: trainer_sdk.Session) -> None:
    gradient = torch.ones(8)
    for step in range(10**9):
        with run.section("data"):
            time.sleep(0.02)
        if os.environ["EVERSTEP_ROUND"] == "1" and dist.get_rank() == CULPRIT and step == AT:
            if FAULT == "raises":
                raise ValueError(f"batch {step} has no labels")
            if (
                FAULT == "silent"
            ):  # its peers lose it, and raise; it says nothing until it is stopped
                os.close(2)
                dist.destroy_process_group()
                signal.pause()
            if FAULT == "skips":
                with run.section("elsewhere"):  # it never comes to the collective
                    while True:
                        time.sleep(0.1)
        with run.section("backward"):
            dist.all_reduce(gradient)
        run.step()


dist.init_process_group("gloo")
with trainer_sdk.session() as run:
    train(run)
