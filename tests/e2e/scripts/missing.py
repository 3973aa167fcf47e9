"""Rank 0 stops first, in a collective; rank 1 of the first round hangs a moment later, in none."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_sdk


def main(folder: Path) -> None:
    run = trainer_sdk.session()
    dist.init_process_group("gloo")
    is_first = os.environ["EVERSTEP_ROUND"] == "1"
    for number in range(1, 2500):  # more than a recorder holds
        with run.section("data"):
            if number == 2400 and is_first and dist.get_rank() == 1:
                while not (folder / "waits").exists():
                    time.sleep(0.02)
                run.heartbeat()  # by that it has moved last
                time.sleep(1000)
        with run.section("exchange"):
            if number == 2400:
                (folder / "waits").touch()
            dist.all_reduce(torch.ones(1))
        run.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
