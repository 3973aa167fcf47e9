"""One rank whose wrapped function raises: `restarting.py RESTARTS`; prints what the process holds.

Each line is of one iteration: open files, threads, and objects of the garbage collector.
"""

import gc
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess import CallWrapper

RESTARTS = int(sys.argv[1])
held: list[tuple[int, ...]] = []  # tuples of numbers are no objects to the collector


@inprocess.Wrapper(  # type: ignore[untyped-decorator]
    last_call_wait=timedelta(0), monitor_thread_interval=timedelta(milliseconds=5)
)
def train(call: CallWrapper = None) -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    gc.collect()
    files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    held.append((files, threads, len(gc.get_objects())))
    if call.iteration < RESTARTS:
        raise RuntimeError("again")


train()
print(json.dumps(held))
