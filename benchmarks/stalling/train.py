"""The training in which the last rank stops making progress, once.

    train.py FOLDER everstep|nvrx sleep|gil

It notes the instant on the clock that all processes of a machine share, and on the wall clock.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.restarts.steps import PACE_S, mark, step
from benchmarks.restarts.train import Descent

HANG_FILE = "hang.txt"
_STEPS_BEFORE = 50
Section = Callable[[str], AbstractContextManager[None]]


def main(folder: Path, library: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    section, stepped = _everstep() if library == "everstep" else _nvrx()
    model = nn.Linear(64, 64)
    optimizer = Descent(model.parameters())
    life = torch.tensor([os.getpid()])
    step(model, optimizer)
    dist.broadcast(life, 0)
    mark(folder, int(life))
    stepped()
    number = 0
    while True:
        number += 1
        with section("data"):
            if number == _STEPS_BEFORE and _is_first_of_last(folder):
                _hang(folder, kind)
            time.sleep(PACE_S)
        with section("forward"):
            step(model, optimizer)
        stepped()


def _is_first_of_last(folder: Path) -> bool:
    return dist.get_rank() == dist.get_world_size() - 1 and not (folder / HANG_FILE).exists()


def _hang(folder: Path, kind: str) -> None:
    note = {"at": time.monotonic(), "wall": time.time(), "pid": os.getpid()}
    (folder / "hang.new").write_text(json.dumps(note))
    (folder / "hang.new").rename(folder / HANG_FILE)
    if kind == "gil":
        ctypes.PyDLL(None).sleep(1000)  # called without giving the interpreter's lock away
    time.sleep(1000)


def _everstep() -> tuple[Section, Callable[[], object]]:
    import trainer_sdk

    run = trainer_sdk.session()
    return run.section, run.step


def _nvrx() -> tuple[Section, Callable[[], object]]:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()

    @contextmanager
    def section(name: str) -> Iterator[None]:
        client.start_section(name)
        yield
        client.end_section(name)

    return section, lambda: None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
