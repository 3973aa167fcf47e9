"""A training that writes down when each of its steps ended, and the processor time of it.

Arguments: the folder, and for how long a step rests. A step has 20 sections and three collectives.
Each rank appends to `FOLDER/times-RANK`: the end of the step by the host's monotonic clock, the
processor time of the main thread, and that of the process. It ends once `FOLDER/end` is there.
"""

import struct
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_sdk

RECORD = struct.Struct("<3d")
SECTIONS = 20
_FILLED = 2100
"""Collectives that fill the flight recorder: its answers are then as large as they ever are."""


def main(folder: Path, rest_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    values, end = torch.ones(1 << 14), torch.zeros(1)
    for _ in range(_FILLED):
        dist.all_reduce(end)
    weights = torch.randn(64, 64)
    with trainer_sdk.session() as run, (folder / f"times-{dist.get_rank()}").open("ab") as times:
        while not end:
            with run.section("data"):
                time.sleep(rest_s)
            for layer in range(SECTIONS - 2):
                with run.section(f"layer {layer}"):
                    weights = torch.tanh(weights @ weights)
            with run.section("exchange"):
                dist.all_reduce(values)
                values /= dist.get_world_size()
                dist.all_reduce(values)
                values /= dist.get_world_size()
                end.fill_((folder / "end").exists())
                dist.all_reduce(end)
            run.step()
            spent = (time.monotonic(), time.thread_time(), time.process_time())
            times.write(RECORD.pack(*spent))
            times.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
