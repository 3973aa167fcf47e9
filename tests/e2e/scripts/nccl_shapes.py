"""A training over gloo whose calls only NCCL's flight recorder tells of, in its shapes.

    nccl_shapes.py FOLDER

gloo's own recorder must be off (`TORCH_FR_BUFFER_SIZE=0`). The recorder here answers as that of
torch 2.13 does on GPUs with `TORCH_NCCL_ENABLE_TIMING=1`: it lists what is not over or everything,
and refuses parameters that it does not know. While the file `slow` is there, the rank in it is late
in each step; with the file `hang`, rank 1 of the first round forgets the others; `end` ends all.
"""

import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _register_handler, _Request, _Response

LATE_S = 0.2
GROUP = {"name": "0", "desc": "default_pg"}


class Recorder:
    """What torch's recorder for NCCL holds: a ring of 2000 entries."""

    def __init__(self) -> None:
        self._entries: deque[dict[str, Any]] = deque(maxlen=2000)
        self._enqueued = self._completed = 0

    def record(self, operation: str, tensor: torch.Tensor) -> dict[str, Any]:
        self._enqueued += 1
        size, dtype = [[*tensor.shape]], ["Float"]
        entry = {
            "collective_seq_id": self._enqueued, "input_dtypes": dtype, "input_sizes": size,
            "is_p2p": False, "op_id": self._enqueued, "output_dtypes": dtype, "output_sizes": size,
            "p2p_seq_id": 0, "pg_id": 0, "process_group": [GROUP["name"], GROUP["desc"]],
            "profiling_name": f"nccl:{operation}", "record_id": self._enqueued - 1,
            "retired": False, "state": "started", "thread_id": "1", "thread_name": "pt_main_thread",
            "time_created_ns": time.time_ns(), "time_discovered_completed_ns": 0,
            "time_discovered_started_ns": time.time_ns(), "timeout_ms": 600000,
        }  # fmt: skip
        self._entries.append(entry)
        return entry

    def complete(self, entry: dict[str, Any]) -> None:
        now_ns = time.time_ns()
        lasted_ms = (now_ns - entry["time_created_ns"]) / 1e6
        entry |= {"duration_ms": lasted_ms, "time_discovered_completed_ns": now_ns}
        entry |= {"state": "completed", "retired": True}
        self._completed = entry["collective_seq_id"]

    def answer(self, request: _Request, response: _Response) -> None:
        if request.get_param("includestacktraces"):
            response.set_status(400)
            response.set_content(b"Invalid parameters - unexpected param passed in", "text/plain")
            return
        is_active = request.get_param("onlyactive") == "true"
        listed = [one for one in self._entries if not is_active or one["state"] != "completed"]
        status = {
            "last_completed_collective": str(self._completed),
            "last_enqueued_collective": str(self._enqueued),
            "last_started_collective": str(self._enqueued),
        }
        trace = {
            "comm_lib_version": "2.29.3",
            **({"entries": [dict(sorted(one.items())) for one in listed]} if listed else {}),
            "nccl_comm_state": {},
            "pg_config": {"0": {**GROUP, "ranks": str([*range(dist.get_world_size())])}},
            "pg_status": {"0": status},
            "version": "2.10",
        }
        response.set_content(json.dumps(trace, separators=(",", ":")).encode(), "application/json")
        response.set_status(200)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    recorder = Recorder()
    _register_handler("dump_nccl_trace_json", recorder.answer)
    train(folder, recorder)
    dist.destroy_process_group()
    os._exit(0)  # torch frees a handler in Python only after the interpreter, and aborts


def train(folder: Path, recorder: Recorder) -> None:
    rank, is_first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    asked = torch.zeros(3)
    while not asked[0]:
        time.sleep(0.02 + LATE_S * (asked[2] == rank + 1).item())
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            entry = recorder.record("all_reduce", parameter.grad)
            dist.all_reduce(parameter.grad)
            recorder.complete(entry)
        optimizer.step()
        slow = folder / "slow"
        late = int(slow.read_text()) + 1 if slow.exists() else 0
        asked.copy_(torch.tensor([(folder / "end").exists(), (folder / "hang").exists(), late]))
        entry = recorder.record("broadcast", asked)
        dist.broadcast(asked, 0)
        recorder.complete(entry)
        if asked[1] and is_first and rank == 1:
            forget_the_others()


def forget_the_others() -> None:
    time.sleep(1000)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
