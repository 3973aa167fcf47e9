"""What a look at each step costs: DDP ranks with and without `run.numerics`, in turns.

    python -m benchmarks.numerics [--ranks 2] [--steps 600] [--hashes 40] [--parameters 25000000]

Each rank trains a small model, and each second step is one with numerics. It is compared with the
mean of those before and after it: the machine drifts more in a second than the look costs.

    wall          from the begin of a step to its optimizer: gloo has made the ranks equal before
    main thread   its processor time until then
    all threads   their processor time in the whole step: some work while the main thread goes on
    replica hash  a hash of all parameters, compared over the ranks, next to a copy of them

Exit code 1 if the median of the main thread in `observe` or `validate_results`, or of the wall time
in `observe`, is more than 0.1 % of a step of 100 ms, or a hash more than 1 % of the steps between
two hashes.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing_price import against, interval
from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.numerics.replica_hash import HASH_EVERY, ReplicaHash
from trainer_sdk.rank_session import session

Mode = Literal["observe", "validate_results"]
_STEP_S = 0.1
_REST_S = 0.02
_WARM_STEPS = 80
_FAST_RATIO, _HASH_RATIO = 0.001, 0.01
_CLOCKS = ("wall", "main thread", "all threads")


class Training:
    """A small DDP training whose steps are timed up to the optimizer."""

    def __init__(self, run: Any, mode: Mode) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(64, 64) for _ in range(8)]
        self._model = DistributedDataParallel(nn.Sequential(*layers))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        state = {"model": self._model, "optimizer": self._optimizer}
        batches = itertools.repeat(torch.randn(8, 64))
        self._numerics = Numerics(run, state, batches, mode=mode, hash_every=0)
        self._watched, self._plain = iter(self._numerics), iter(batches)
        self._run = run

    def _computed(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self, *, is_watched: bool) -> tuple[float, ...]:
        """Train a step; return what each clock has counted."""
        whole, main, wall = time.process_time(), time.thread_time(), time.perf_counter()
        if is_watched:
            loss = self._numerics.compute(self._computed, next(self._watched))
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            assert self._numerics.accepts(loss=loss, grad_norm=norm)
        else:
            loss = self._computed(next(self._plain))
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        wall, main = time.perf_counter() - wall, time.thread_time() - main
        self._optimizer.step()
        self._optimizer.zero_grad()
        if is_watched:
            self._run.step()
        time.sleep(_REST_S)
        return wall, main, time.process_time() - whole

    def more(self, steps: int) -> list[list[float]]:
        """For each clock, how much more it has counted in each step with numerics."""
        counted = [self.step(is_watched=bool(number % 2)) for number in range(2 * steps + 1)]
        return [against(values) for values in zip(*counted, strict=True)]


def hashes(parameters: int, times: int) -> tuple[list[float], list[float]]:
    """Seconds of hashes with their comparison, and of copies of the parameters, in turns."""
    width = 1000
    named = {
        f"layers.{index}.weight": nn.Parameter(torch.full((width, width), float(index)))
        for index in range(parameters // width**2)
    }
    names = list(named)
    everyone = dist.group.WORLD
    group_of = {name: index % 64 for index, name in enumerate(names)}
    replicas = ReplicaHash(named, names[:64], group_of, [], group_of_all(), everyone)
    copies = [torch.empty_like(parameter) for parameter in named.values()]

    def hash_all() -> None:
        assert replicas.compared_now(1) is None

    def copy_all() -> None:
        with torch.no_grad():
            torch._foreach_copy_(copies, list(named.values()))

    timings = [(_timed(hash_all), _timed(copy_all)) for _ in range(times + 1)][1:]
    return [hashed for hashed, _ in timings], [copied for _, copied in timings]


def _timed(act: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def rank(number: int, folder: Path, options: argparse.Namespace) -> None:
    """Measure on a rank, and write what came out."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=number, world_size=options.ranks)
    measured: dict[str, Any] = {}
    with session() as run:
        for mode in ("observe", "validate_results"):
            training = Training(run, mode)
            for _ in range(_WARM_STEPS):  # until the statistics know what to expect
                training.step(is_watched=True)
            measured[mode] = training.more(options.steps)
    measured["hash"], measured["copy"] = hashes(options.parameters, options.hashes)
    (folder / f"{number}.json").write_text(json.dumps(measured))
    dist.barrier()


def forked(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fork the ranks; return what each has measured."""
    pids = []
    for number in range(options.ranks):
        pid = os.fork()
        if not pid:
            try:
                rank(number, folder, options)
            except BaseException:  # noqa: BLE001 - a fork must not go on with its parent's work
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    if any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids):
        sys.exit("a rank has failed")
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(options.ranks)]


def row(name: str, seconds: Sequence[float], whole_s: float, limit: float | None) -> bool:
    """Print a row; return whether the median is within the limit."""
    middle = median(seconds)
    ratio = middle / whole_s
    is_within = limit is None or ratio <= limit
    figures = "".join(f"{value * 1e6:12.1f}" for value in (middle, *interval(seconds)))
    shown = "" if limit is None else f"{limit:10.2%}  {'yes' if is_within else 'NO'}"
    print(f"{name:32}{figures}{len(seconds):6}{ratio:11.4%}{shown}")
    return is_within


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--hashes", type=int, default=40)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = forked(Path(folder), options)
    print(f"load {os.getloadavg()[0]:.1f}; the interval has the median with at least 95 %")
    print(f"{'':32}{'median, µs':>12}{'from':>12}{'to':>12}{'n':>6}{'ratio':>11}{'limit':>10}")
    is_within = True
    for mode in ("observe", "validate_results"):
        for index, clock in enumerate(_CLOCKS):
            more = [value for each in measured for value in each[mode][index]]
            is_limited = clock == "main thread" or (clock, mode) == ("wall", "observe")
            limit = _FAST_RATIO if is_limited else None
            is_within &= row(f"{mode}, {clock}", more, _STEP_S, limit)
    hashed = [value for each in measured for value in each["hash"]]
    copied = [value for each in measured for value in each["copy"]]
    is_within &= row("replica hash, each 100 steps", hashed, HASH_EVERY * _STEP_S, _HASH_RATIO)
    row("copy of the parameters", copied, HASH_EVERY * _STEP_S, None)
    copies = median(hashed) / median(copied)
    print(f"a hash of {options.parameters} parameters takes as long as {copies:.2f} copies")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
