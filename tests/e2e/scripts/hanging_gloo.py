"""A training with gloo whose rank 1 fails at step 5 of round 1, in the way that its arguments name.

With `steady` it goes on until the file `end` is in the folder.
"""

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_sdk

kind, folder = sys.argv[1], Path(sys.argv[2])
run = trainer_sdk.session()
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
is_culprit = os.environ["EVERSTEP_ROUND"] == "1" and dist.get_rank() == 1


def hang() -> None:
    match kind:
        case "skip":
            time.sleep(1000)
        case "gil":
            ctypes.PyDLL(None).sleep(1000)  # called without giving the interpreter's lock away
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            pass


go_on, step = torch.ones(1), 0
while go_on.item():
    step += 1
    with run.section("data"):
        if step == 5 and is_culprit:
            hang()
        time.sleep(0.02)
    with run.section("exchange"):
        dist.all_reduce(torch.ones(8))
    run.step()
    go_on.fill_(float(not (folder / "end").exists() if kind == "steady" else step < 20))
    dist.broadcast(go_on, 0)
dist.destroy_process_group()
