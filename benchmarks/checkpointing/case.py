"""Contenders on one rank, in a process of its own; rank 0 prints JSON.

python -m benchmarks.checkpointing.case NAMES MIB ROUNDS FOLDER [busy | paced]
NAMES are contenders that save in turns, with commas between them; or `restore`.
"""

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader

from benchmarks.checkpointing.contenders import (
    Contender,
    Everstep,
    State,
    contender,
    do_without_cuda,
)

TENSORS = 16
OWNED = frozenset({"everstep", "everstep-lazy", "back"})
WARM = 2
_BUSY = 512
_STEPS = 300
_MOST_SAVES = 5
_LEARNING, _EVERY_S = 3, 30.0  # the least that `every="auto"` chooses

if any(one.startswith("nvrx") for one in sys.argv):
    do_without_cuda()  # here, so that its process, which imports this module, does it, too


def main() -> None:
    names, mib, rounds, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    state, optimizer = made(mib)
    if names == "restore":
        found = restored_by_us(folder, state, rounds)
    else:
        ones = {name: contender(name, folder, state, optimizer) for name in names.split(",")}
        found = saved(ones, folder, state, optimizer, rounds)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    if dist.get_rank() == 0:
        slowest = {
            key: [max(row) for row in zip(*(each[key] for each in everybody), strict=True)]
            for key in found
        }
        print(json.dumps(slowest), flush=True)
    dist.destroy_process_group()


def made(mib: int) -> tuple[State, Any]:
    """Parameters and both moments of Adam, different on each rank, of this size in MiB."""
    each = (mib << 20) // 4 // TENSORS
    rank = dist.get_rank()
    torch.manual_seed(rank)
    values = [torch.nn.Parameter(torch.randn(each)) for _ in range(TENSORS)]
    optimizer = torch.optim.SGD(values, lr=0.1)
    return {f"rank{rank}.{number}": one for number, one in enumerate(values)}, optimizer


def restored_by_us(folder: Path, state: State, rounds: int) -> dict[str, list[float]]:
    from benchmarks.checkpointing.restores import restored  # NVRx's interpreter has no use for it

    return restored(folder, state, rounds)


def saved(
    ones: dict[str, Contender], folder: Path, state: State, optimizer: Any, rounds: int
) -> dict[str, list[float]]:
    """By `name what`."""
    found: dict[str, list[float]] = {}
    if sys.argv[5:]:
        while_saving = {"busy": busy, "paced": paced}[sys.argv[5]]
        (one,) = ones.values()
        found = while_saving(one, folder, state)
    else:
        for number in range(WARM + rounds):
            for name in sorted(ones, reverse=bool(number % 2)):
                took = timed(ones[name], folder / f"{name}-{number}", state)
                for what, ms in took.items() if number >= WARM else [("first", took["stall"])]:
                    found.setdefault(f"{name} {what}", []).append(ms)
                if dist.get_rank() == 0:
                    clean(folder)
                dist.barrier()
        for name, one in ones.items():
            found[f"{name} later"] = later(one, folder, state, optimizer)
    for one in ones.values():
        one.close()
    return found


def timed(one: Contender, path: Path, state: State) -> dict[str, float]:
    """One save, in milliseconds; the first ones of each make plans and memory."""
    dist.barrier()
    began = time.perf_counter()
    one.save(path, state)
    stalled = time.perf_counter()
    one.settle()
    settled = time.perf_counter()
    one.finish()
    ended = time.perf_counter()
    dist.barrier()
    return {
        "stall": (stalled - began) * 1e3,
        "settle": (settled - stalled) * 1e3,
        "written": (ended - stalled) * 1e3,
        "durable": (ended - began) * 1e3,
    }


def later(one: Contender, folder: Path, state: State, optimizer: Any) -> list[float]:
    """1 if it has stored values of after the call: the optimizer makes a step meanwhile.

    Large states leave no room for a copy: hashes are compared, one tensor is read at a time.
    """
    path = folder / "later"
    expected = {key: hashed(value) for key, value in state.items()}
    one.save(path, state)
    for value in state.values():
        value.grad = torch.ones(()).expand(value.shape)
    optimizer.step()
    one.finish()
    place = one.place(path)
    if place is None:
        return []
    dist.barrier()
    is_later = False
    for key, value in state.items():
        found = {key: torch.zeros_like(value)}
        state_dict_loader.load(found, checkpoint_id=place)
        is_later |= hashed(found[key]) != expected[key]
    return [float(is_later)]


def hashed(value: torch.Tensor) -> bytes:
    return hashlib.sha1(value.detach().numpy().data, usedforsecurity=False).digest()


def busy(one: Contender, folder: Path, state: State) -> dict[str, list[float]]:
    """Deciles, in milliseconds, of a step of matrix products.

    Alone, while another process does nothing but write as much, and while saves drain.
    """
    step = busy_step()

    def steps(until: threading.Event | None, most: int) -> list[float]:
        found: list[float] = []
        while len(found) < most and not (until is not None and until.is_set()):
            found.append(step())
        return found

    for number in range(WARM):
        one.save(folder / f"warm-{number}", state)
        one.finish()
        dist.barrier()
        if dist.get_rank() == 0:
            clean(folder)
        dist.barrier()
    steps(None, 50)
    alone = steps(None, _STEPS)
    size_mib = sum(one.nbytes for one in state.values()) >> 20
    writing: list[float] = []
    for _ in range(_MOST_SAVES):
        writing += steps_while(steps, lambda: plainly_written(folder, size_mib))
    draining: list[float] = []
    for number in range(_MOST_SAVES):
        dist.barrier()  # as many saves on each rank, whatever it has counted
        one.save(folder / f"busy-{number}", state)
        draining += steps_while(steps, one.finish)
    found = {"alone": alone, "beside a plain write": writing, "draining": draining}
    return {what: deciles(values) for what, values in found.items()}


def paced(one: Contender, folder: Path, state: State) -> dict[str, list[float]]:
    """The same as a training has it, which calls `step`, and waits for no save.

    Steps between saves, and while one drains; and how long that takes. The first saves are those
    that the pace is learnt from.
    """
    assert isinstance(one, Everstep)
    step, saves, number = busy_step(), one.saves, 0
    alone: list[float] = []
    draining: list[float] = []
    lasted: list[float] = []
    for count in range(_LEARNING + _MOST_SAVES):
        dist.barrier()
        began = time.perf_counter()
        one.save(folder / f"paced-{count}", state)
        one.settle()
        ended = began
        while (now := time.perf_counter()) < began + _EVERY_S:
            took, number = step(), number + 1
            saves.step(number, state)
            if count >= _LEARNING:
                (draining if saves.unfinished else alone).append(took)
            if saves.unfinished:
                ended = now
        if count >= _LEARNING:
            lasted.append((ended - began) * 1e3)
        dist.barrier()
        if dist.get_rank() == 0:
            clean(folder)
    return {"alone": deciles(alone), "draining": deciles(draining), "durable": lasted}


def busy_step() -> Callable[[], float]:
    """On all cores that torch uses; its milliseconds."""
    matrix = torch.randn(_BUSY, _BUSY)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(4):
            torch.mm(matrix, matrix)
        return (time.perf_counter() - began) * 1e3

    return step


Steps = Callable[[threading.Event | None, int], list[float]]


def steps_while(steps: Steps, work: Callable[[], object]) -> list[float]:
    """Steps until the work, in a thread, is done."""
    done = threading.Event()

    def drain() -> None:
        work()
        done.set()

    thread = threading.Thread(target=drain)
    thread.start()
    found = steps(done, 100_000)
    thread.join()
    return found


def plainly_written(folder: Path, size_mib: int) -> None:
    """In a process of its own, as nice as our writer."""
    path = folder / f"plain-{dist.get_rank()}"
    words = [f"of={path}", "if=/dev/zero", "bs=16M", f"count={size_mib // 16}"]
    ways = ["oflag=direct", "conv=fsync", "status=none"]
    subprocess.run(["nice", "-n", "10", "dd", *words, *ways], check=True)
    path.unlink()


def deciles(values: list[float]) -> list[float]:
    """Nine of them, so that two counts can be compared."""
    return statistics.quantiles(values, n=10)


def clean(folder: Path) -> None:
    """All but who owns it: a disk that fills up gets slower."""
    for one in [*folder.iterdir(), *folder.glob("everstep*/step-*")]:
        if one.name in OWNED or one.name.startswith("everstep-dcp"):
            continue
        if one.is_dir():
            shutil.rmtree(one)
        else:
            one.unlink()
    os.sync()


if __name__ == "__main__":
    main()
