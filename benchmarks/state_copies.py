"""A state from one process to another of the same node, and whole heals, next to a plain copy.

    python -m benchmarks.state_copies [--mib 1024] [--rounds 5]

In turns, in one run: the limit is a copy within a process.
"""

import argparse
import mmap
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rig import HEAD, row
from everstep.hashing import Hasher
from trainer_sdk.survive import heal as healing
from trainer_sdk.survive.peer_memory import hash_memory, read_memory

PARTS = 16
Taken = dict[str, list[float]]


class NoHash:
    """Takes bytes, and forgets them."""

    def update(self, octets: object) -> None:
        pass


class Pair:
    """One of two ranks: rank 1 copies from rank 0."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.taken = rank, size, Taken()
        place = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
        self.own = torch.full((size,), rank + 1, dtype=torch.uint8)
        about = torch.tensor([self.own.data_ptr(), os.getpid()])
        dist.broadcast(about, 0)
        self.address, self.pid = about.tolist()

    def measure(self, name: str, copy: Callable[[], object]) -> None:
        """From the moment at which both are ready until both have finished."""
        dist.barrier()
        began = time.perf_counter()
        copy()
        dist.barrier()
        self.taken.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    def gloo(self) -> None:
        (dist.recv(self.own, 0) if self.rank else dist.send(self.own, 1))

    def shared_file(self) -> None:
        """A new file in /dev/shm, read while it is written."""
        path = Path(f"/dev/shm/everstep-bench-{self.pid}")
        if not self.rank:
            path.touch(0o600)
            os.truncate(path, self.size)
        dist.barrier()
        with path.open("r+b") as file:
            shared = torch.frombuffer(mmap.mmap(file.fileno(), self.size), dtype=torch.uint8)
        mark = torch.zeros(1)
        for there, here in zip(shared.chunk(PARTS), self.own.chunk(PARTS), strict=True):
            if self.rank:
                dist.recv(mark, 0)
                here.copy_(there)
            else:
                there.copy_(here)
                dist.send(mark, 1)
        if self.rank:
            path.unlink()

    def memory(self, into: Any = None, target: Tensor | None = None) -> None:
        hashes: Any = into or NoHash()
        target = self.own if target is None else target
        if self.rank:
            read_memory(self.pid, self.address, target.data_ptr(), self.size, hashes)
        elif into is not None:
            hash_memory(self.own.data_ptr(), self.size, into)

    def heal(self) -> None:
        """Rank 1 is a new process: a model without a step, and an optimizer without a state."""
        torch.manual_seed(0)
        width = 1024
        layers = max(self.size // (3 * 4 * width * width), 1)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        if not self.rank:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            state["optimizer"].step()
            state["optimizer"].zero_grad()
        step = None if self.rank else 1

        def whole() -> None:
            healed = healing.heal(state, step=step, is_torn=False, made_in=1, round=2)
            assert healed.origin == ("rank" if self.rank else "own")

        self.measure("heal() of a model with AdamW, new process", whole)

    def run(self, rounds: int) -> Taken:
        for _ in range(rounds):
            self.measure("gloo: send and receive", self.gloo)
            self.measure("/dev/shm: a new file, 16 parts", self.shared_file)
            self.measure("process_vm_readv", self.memory)
            self.measure("process_vm_readv, hashed on both sides", lambda: self.memory(Hasher()))
            new = torch.empty(self.size, dtype=torch.uint8)
            name = "process_vm_readv, hashed, into new memory"
            self.measure(name, lambda new=new: self.memory(Hasher(), new))  # type: ignore[misc]
            del new
            self.heal()
        return self.taken


def limits(size: int, rounds: int) -> Taken:
    """Copies and hashes within this process."""
    taken = Taken()
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def measure(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        taken.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    for _ in range(rounds):
        measure("limit: a copy in a process", lambda: target.copy_(source))
        measure("limit: a copy into new memory", source.clone)
        measure("XXH3", lambda: hash_memory(source.data_ptr(), size, Hasher()))
    return taken


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--mib", type=int, default=1024)
    made.add_argument("--rounds", type=int, default=5)
    asked = made.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = asked.mib << 20
    print(f"{asked.mib} MiB, load {os.getloadavg()[0]:.1f}; milliseconds\n{HEAD}", flush=True)
    for name, values in limits(size, asked.rounds).items():
        print(row(name, values), flush=True)
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        pids = [forked(rank, size, asked.rounds, Path(folder)) for rank in range(2)]
        for pid in pids:
            os.waitpid(pid, 0)


def forked(rank: int, size: int, rounds: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        taken = Pair(rank, size, folder).run(rounds)
        for name, values in taken.items() if rank else ():
            print(row(name, values), flush=True)
        dist.barrier()
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
