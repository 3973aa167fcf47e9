"""Forms a gloo group, makes one all-reduce and some steps."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == dist.get_world_size()
print("reduced", time.monotonic(), flush=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(os.environ.get("STEPS", "3"))):
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
print("stepped", time.monotonic(), flush=True)
if "wait" in sys.argv:
    signal.pause()
dist.destroy_process_group()
