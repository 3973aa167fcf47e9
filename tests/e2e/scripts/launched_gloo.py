"""A training started by torchrun: rank 1 fails in the first round; the second one is with gloo.

torchrun's ranks meet at a store that outlives a round: what a process group has left there in the
first may be taken for what belongs to the second.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_sdk


def fail(run: trainer_sdk.Session) -> None:
    while True:
        time.sleep(0.02)
        if run.step() == 3 and os.environ["RANK"] == "1":
            raise RuntimeError("the loss is not finite")


def train(run: trainer_sdk.Session, folder: Path) -> None:
    dist.init_process_group("gloo")
    go_on = torch.ones(1)
    while go_on.item():
        with run.section("broadcast"):
            go_on.fill_(0.0 if (folder / "end").exists() else 1.0)
            dist.broadcast(go_on, 0)
        run.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    session = trainer_sdk.session()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fail(session)
    train(session, Path(sys.argv[1]))
