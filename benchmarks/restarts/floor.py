"""What no launcher can beat: fork from a process that has torch, form gloo, make a first step."""

import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.restarts import train
from benchmarks.restarts.ports import free_port


def main(folder: Path, ranks: int, rounds: int) -> None:
    for _ in range(rounds):
        began = time.monotonic()
        pids = [_fork(rank, ranks, folder) for rank in _places(ranks)]
        while len(list(folder.glob(f"{pids[0]}.*.json"))) < ranks:
            time.sleep(0.002)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        (folder / f"{pids[0]}.began").write_text(repr(began))


def _places(ranks: int) -> range:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    os.environ.update(place)
    return range(ranks)


def _fork(rank: int, ranks: int, folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
        try:
            train.main(folder)
        finally:
            os._exit(1)
    return pid


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
