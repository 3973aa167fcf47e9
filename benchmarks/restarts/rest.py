"""A training at rest: one step on all ranks, so that the job runs, and then nothing."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.restarts.train import Descent, mark, step

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
step(model, Descent(model.parameters()))
mark(Path(sys.argv[1]), 1)
time.sleep(86_400)
