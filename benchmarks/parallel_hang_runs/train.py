"""A rank of a small training in groups TP x PP x DP over gloo; one thing fails at a drawn rank.

The layers are sums of tiny tensors: what matters is who meets whom. It knows nothing of Everstep.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.parallel_hang_runs.cases import FAULTS, Drawn, drawn

FORWARD, BACKWARD = 16, 24
_MICRO_BATCHES = 2
_STEPS = 100_000
_HOURS = timedelta(hours=2)


class BadSampleError(Exception):
    """A sample that the forward pass refuses."""


class ParallelTraining:
    """One rank; each step has forward and backward passes of micro-batches, and an update."""

    def __init__(self, shape: tuple[int, int, int], case: Drawn, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.step = 0
        dist.init_process_group("gloo", timeout=_HOURS)
        self.rank = dist.get_rank()
        tp, pp, dp = shape
        grid = torch.arange(tp * pp * dp).reshape(pp, dp, tp)
        self.tensor = self._own_group(grid.reshape(-1, tp))
        self.data = self._own_group(grid.transpose(1, 2).reshape(-1, dp))
        self.pipe = self._own_group(grid.permute(1, 2, 0).reshape(-1, pp))
        self.metrics = dist.new_group(timeout=_HOURS, group_desc="metrics")
        lines: list[list[int]] = grid.permute(1, 2, 0).reshape(-1, pp).tolist()
        line = next(row for row in lines if self.rank in row)
        stage = line.index(self.rank)
        self.before = line[stage - 1] if stage else None
        self.after = line[stage + 1] if stage + 1 < pp else None
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.optimizer = torch.optim.SGD([self.weight], lr=1e-6)

    def _own_group(self, groups: torch.Tensor) -> dist.ProcessGroup:
        """Make all groups, and return the one that this rank is in."""
        made = [(row, dist.new_group(row, timeout=_HOURS)) for row in groups.tolist()]
        own: dist.ProcessGroup = next(group for row, group in made if self.rank in row)
        return own

    @property
    def is_due(self) -> bool:
        """Whether this rank is the one, and this step, at which it fails."""
        return self.rank == self.case.rank and self.step == self.case.step

    def run(self) -> None:
        for self.step in range(1, _STEPS):
            if self.is_due:
                self._tell()
            if self._leaves_early():
                break
            try:
                self.passes()
            except BadSampleError as error:
                print(f"step {self.step}: bad sample, skipped: {error}", flush=True)
                self._handle()
                continue
            self.update()
        dist.barrier()

    def _tell(self) -> None:
        """Note the time at which the step began that will not end."""
        note = self.folder / "fault.new"
        note.write_text(json.dumps({"at": time.time(), "pid": os.getpid()}))
        note.rename(self.folder / f"fault-{_restarts()}.json")

    def _fails(self, name: str) -> bool:
        return self.is_due and self.case.fault == name

    # -- a step ----------------------------------------------------------------------------------

    def passes(self) -> None:
        """All forward passes, then all backward passes."""
        for number in range(_MICRO_BATCHES):
            self.forward(number)
        for _ in range(_MICRO_BATCHES):
            self.backward()

    def forward(self, number: int) -> None:
        act = torch.ones(FORWARD)
        if self.before is not None:
            dist.recv(act, self.before)
        if number == self.case.micro_batch and self.is_due:
            self._break_forward()
        if not (self._fails("other_branch") and number == self.case.micro_batch):
            dist.all_reduce(act, group=self.tensor)
        self.experts(act, number)
        if self.after is not None:
            dist.send(act, self._receiver(number))

    def _receiver(self, number: int) -> int:
        """The next stage; that of another pipeline where this is the fault."""
        assert self.after is not None
        is_wrong = self._fails("wrong_peer") and number == self.case.micro_batch
        return self.after ^ 1 if is_wrong else self.after

    def experts(self, act: torch.Tensor, number: int) -> None:
        """Tokens go to the ranks of the tensor group, and come back."""
        world = self.tensor.size()
        sizes = [FORWARD // world] * world
        if self._fails("wrong_split") and number == self.case.micro_batch:
            sizes = [FORWARD // world - 1] * (world - 1)
            sizes.append(FORWARD - sum(sizes))
        tokens = torch.empty_like(act)
        dist.all_to_all_single(tokens, act, sizes, sizes, group=self.tensor)

    def backward(self) -> None:
        grad = torch.ones(BACKWARD)
        if self.after is not None:
            dist.recv(grad, self.after)
        dist.all_reduce(grad, group=self.tensor)
        if self.before is not None:
            dist.send(grad, self.before)

    def update(self) -> None:
        """Gradients of the data group, their norm in the world, the loss, and the optimizer."""
        grad = torch.ones(9 if self._fails("wrong_shape") else 8)
        dist.all_reduce(grad, group=self.data)
        self.weight.grad = grad[:8]
        norm = torch.ones(1)
        if self._fails("other_norm"):
            dist.all_reduce(norm, group=self.pipe)
        else:
            dist.all_reduce(norm)
        loss = torch.ones(1)
        root = self.rank if self._fails("wrong_root") else 0
        dist.broadcast(loss, root, group=self.metrics)
        self.optimizer.step()

    # -- what fails ------------------------------------------------------------------------------

    def _break_forward(self) -> None:
        breaks: dict[str, Callable[[], None]] = {
            "alone_in_metrics": self._average_alone,
            "compiles": _compile_graph,
            "skips_sample": _refuse,
            "waits_in_handler": _refuse,
            "hung_kernel": _launch,
            "hung_kernel_locked": _launch_locked,
            "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "cut_off": _cut,
        }
        if self.case.fault in breaks:
            breaks[self.case.fault]()

    def _average_alone(self) -> None:
        """A loss that looks odd is averaged over all ranks, by the rank that finds it odd."""
        dist.all_reduce(torch.ones(1), group=self.metrics)

    def _handle(self) -> None:
        if self.case.fault == "waits_in_handler":
            dist.barrier()

    def _leaves_early(self) -> bool:
        """Whether the data of this rank has come to its end."""
        return self._fails("fewer_batches")


def _refuse() -> None:
    raise BadSampleError("a token is beyond the vocabulary")


def _compile_graph() -> None:
    """A shape that only this rank has seen: it waits for its compiler."""
    subprocess.run(["sleep", "3600"], check=True)


def _launch() -> None:
    """A call of a library that does not return."""
    ctypes.CDLL(None).pause()


def _launch_locked() -> None:
    """The same, with the lock of the interpreter."""
    ctypes.PyDLL(None).pause()


def _cut() -> None:
    """All connections of the rank end."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held = socket.socket(fileno=os.dup(int(entry)))
            if held.family != socket.AF_UNIX:
                held.shutdown(socket.SHUT_RDWR)


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seed", type=int, required=True, help="of the first start")
    words.add_argument("--fault", choices=[name for name, *_ in FAULTS])
    words.add_argument("--shape", required=True, help="TP,PP,DP")
    words.add_argument("--folder", type=Path, required=True)
    asked = words.parse_args()
    tp, pp, dp = map(int, asked.shape.split(","))
    torch.set_num_threads(1)
    case = drawn(asked.seed + _restarts(), (tp, pp, dp), asked.fault)
    ParallelTraining((tp, pp, dp), case, asked.folder).run()


if __name__ == "__main__":
    main()
