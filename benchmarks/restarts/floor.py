"""What no launcher can beat: fork from a process that has torch, form gloo, make a first step.

A program of its own, so that the measurement has no torch: `python -m benchmarks.restarts.floor
FOLDER RANKS TIMES` leaves the marks in FOLDER, and in `times` what each round took.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.restarts import train
from benchmarks.restarts.ports import free_port

_LOOK_EVERY_S = 0.002


def main(folder: Path, ranks: int, times: int) -> None:
    took_ms = [_round(folder, ranks) for _ in range(times)]
    fresh = folder / "times.new"
    fresh.write_text(json.dumps(took_ms))
    fresh.rename(folder / "times")


def _round(folder: Path, ranks: int) -> float:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    os.environ.update(place)
    began = time.monotonic()
    pids = [_fork(rank, folder) for rank in range(ranks)]
    while len(marks := list(folder.glob(f"{pids[0]}.*.json"))) < ranks:
        time.sleep(_LOOK_EVERY_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 1000 * (max(float(json.loads(mark.read_text())["at"]) for mark in marks) - began)


def _fork(rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
        try:
            train.main([str(folder)])
        finally:
            os._exit(1)
    return pid


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
