"""A wrapped training of gloo ranks: `wrapped_ranks.py FOLDER RANKS FAULT PORT` forks the ranks.

Under a launcher it is a rank itself: RANKS is 0, and there is no PORT. Each rank writes what its
function has seen last: iteration, rank, number of ranks, and the sum of all steps.
Nothing in it knows Everstep.
"""

import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess import CallWrapper
from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.finalize import Finalize
from nvidia_resiliency_ext.inprocess.health_check import FaultCounter
from nvidia_resiliency_ext.inprocess.initialize import RetryController
from nvidia_resiliency_ext.inprocess.rank_assignment import (
    ActivateAllRanks,
    MaxActiveWorldSize,
    ShiftRanks,
)

FOLDER, RANKS, FAULT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
STEPS, FAULT_AT = 6, 3
WITHIN = timedelta(seconds=120)
SOFT_S, HARD_S = {"hung": (30, 100), "stuck": (25, 40)}.get(FAULT, (100, 110))
HARMED = {1, 2} if FAULT == "vanished" else {1}


class Note(Finalize):  # type: ignore[misc]
    """Notes that it was called."""

    def __call__(self, state: Any) -> Any:
        with (FOLDER / f"finalized-{state.initial_rank}").open("a") as file:
            file.write(f"{state.iteration} {type(state.fn_exception).__name__}\n")
        return state


def initial() -> int:
    """The rank as the launcher has set it; the wrapper changes `RANK`."""
    return _first.setdefault("rank", int(os.environ["RANK"]))


_first: dict[str, int] = {}


def assignment() -> Any:
    if FAULT == "reserve":
        return inprocess.Compose(MaxActiveWorldSize(2), ShiftRanks())
    return inprocess.Compose(ActivateAllRanks(), ShiftRanks())


@inprocess.Wrapper(  # type: ignore[untyped-decorator]
    initialize=RetryController(max_iterations=5),
    abort=AbortTorchDistributed(),
    finalize=Note(),
    health_check=FaultCounter(0 if FAULT in ("excluded", "reserve") else None),
    rank_assignment=assignment(),
    soft_timeout=timedelta(seconds=SOFT_S),
    hard_timeout=timedelta(seconds=HARD_S),
    last_call_wait=timedelta(seconds=0.2),
)
def train(text: str, call: CallWrapper = None) -> int:
    assert text == "text"
    dist.init_process_group("gloo", timeout=WITHIN)
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(1)
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(1, STEPS + 1):
        if step == FAULT_AT and call.iteration == 0 and initial() in HARMED and is_first:
            harm()
        model(torch.ones(2, 4)).mean().backward()
        value = torch.ones(1)
        dist.all_reduce(value)
        total += value
    seen = [call.iteration, rank, size, int(total)]
    (FOLDER / f"end-{call.state.initial_rank}").write_text(json.dumps(seen))
    del model  # before its group: otherwise torch may hang
    dist.destroy_process_group()
    return rank


def harm() -> None:
    if FAULT in ("raises", "excluded", "reserve"):
        raise RuntimeError("on purpose")
    if FAULT == "vanished":  # as when its container ends: nobody is left to speak for it
        monitors = psutil.Process().children()
        if not os.fork():
            time.sleep(20)  # a worker that outlives it
            os._exit(0)
        for monitor in monitors:
            monitor.kill()
    if FAULT in ("killed", "vanished"):
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "hung":
        dist.barrier(dist.new_group([1]), async_op=False)
        dist.recv(torch.ones(1), 0)
    if FAULT == "stuck":
        time.sleep(1000)


def run() -> None:
    initial()
    result = train("text")
    (FOLDER / f"result-{initial()}").write_text(json.dumps(result))


def forked(port: str) -> list[int]:
    """The exit codes of the ranks, which meet at this port."""
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            code = 1
            try:
                run()
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ranks.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


if __name__ == "__main__":
    if RANKS:
        print(json.dumps(forked(sys.argv[4])))
    else:
        run()
