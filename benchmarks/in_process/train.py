"""A training that raises on request, for all contenders: `train.py FOLDER HOW [RANKS]`.

`HOW` is `plain`, or the package whose wrapper restarts the function, `everstep` or `nvrx`, with
`-at-once` for no wait before the abort. With RANKS, it forks the ranks itself; otherwise a launcher
has started it as a rank. When the file `raise` is there, the last rank removes it, and raises.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from benchmarks.restarts.ports import free_port
from benchmarks.restarts.steps import PACE_S, mark, step
from benchmarks.restarts.train import Descent

ORDER, RAISED = "raise", "raised"
PORT = "BENCH_NVRX_PORT"
WITHIN = timedelta(seconds=20)
"""Of collectives: a rank that nobody releases waits so long for the others."""


class AskedForError(RuntimeError):
    """Raised on purpose."""


def train(folder: Path, join: Callable[[], None]) -> None:
    """Make steps for ever, or until this rank is asked to raise."""
    join()
    model = nn.Linear(64, 64)
    optimizer = Descent(model.parameters())
    step(model, optimizer)
    life = torch.tensor([time.monotonic_ns()])
    dist.broadcast(life, 0)
    mark(folder, int(life))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    while True:
        step(model, optimizer)
        time.sleep(PACE_S)
        if is_last and (folder / ORDER).exists():
            (folder / ORDER).unlink()
            note_raised(folder)
            raise AskedForError("on purpose")


def note_raised(folder: Path) -> None:
    """Write down the time of the exception."""
    fresh = folder / f"{RAISED}.new"
    fresh.write_text(json.dumps(time.monotonic()))
    fresh.rename(folder / RAISED)


def join() -> None:
    """Make the process group as launchers and Everstep's wrapper have it."""
    dist.init_process_group("gloo", timeout=WITHIN)


def plain(folder: Path) -> None:
    """Train without restarts in the process."""
    train(folder, join)


def wrapped_by_everstep(folder: Path, options: dict[str, Any]) -> None:
    """Train with Everstep's wrapper."""
    from trainer_sdk.nvrx.inprocess import Wrapper

    Wrapper(**options)(plain)(folder)


def wrapped_by_nvrx(folder: Path, options: dict[str, Any]) -> None:
    """Train with NVRx's wrapper, whose store has a port of its own, as in its examples."""
    from nvidia_resiliency_ext.inprocess import CallWrapper, Wrapper

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    base = TCPStore(host, port, size, is_master=rank == 0, multi_tenant=True)

    def function(folder: Path, call: CallWrapper = None) -> None:
        def join_again() -> None:
            own = PrefixStore(str(call.iteration), base)
            dist.init_process_group("gloo", timeout=WITHIN, store=own, rank=rank, world_size=size)

        train(folder, join_again)

    Wrapper(store_kwargs={"port": int(os.environ[PORT])}, **options)(function)(folder)


def main(folder: Path, how: str, ranks: int) -> None:
    torch.set_num_threads(1)
    package, _, at_once = how.partition("-")
    options: dict[str, Any] = {"last_call_wait": timedelta(0)} if at_once else {}

    def function() -> None:
        if package == "plain":
            plain(folder)
        else:
            {"everstep": wrapped_by_everstep, "nvrx": wrapped_by_nvrx}[package](folder, options)

    if not ranks:
        function()
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"WORLD_SIZE": str(ranks), PORT: str(free_port())}
    pids = [_forked(rank, package, function) for rank in range(ranks)]
    for pid in pids:
        os.waitpid(pid, 0)


def _forked(rank: int, package: str, work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ["RANK"] = str(rank)
        if package != "nvrx":  # with it, NVRx checks the rank's GPU, and ends a rank without one
            os.environ["LOCAL_RANK"] = str(rank)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            work()
        finally:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return pid


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 0)
