"""A small gloo training in which one thing goes wrong, on purpose, at a rank that a seed draws.

    torchrun --nproc-per-node 4 tests/corpus/training.py --fault sleeping_rank --variant 0 --seed 7

It is a rank of any launcher, and needs torch and this checkout only. Each fault is in `injected/`,
its label in `faults.py`; `README.md` says how to use the corpus elsewhere.
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.corpus.injected.registry import Hook, injections

STEPS = 12
_BATCH = 8


def draw(seed: int, world: int) -> tuple[int, int]:
    """The rank that is hit, and the step at which."""
    dice = random.Random(seed)
    return dice.randrange(world), dice.randint(2, 6)


class Samples:
    """Random rows; reading one of them may be a trap."""

    def __init__(self, count: int, spring: Callable[[], None], at: int) -> None:
        self._count, self._spring, self._at = count, spring, at

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        import torch

        if index == self._at:
            self._spring()
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class CorpusTraining:
    """One rank: loads, computes, reduces, reports, saves."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.culprit, self.at = draw(options.seed, self.world)
        self.folder = Path(options.folder or tempfile.mkdtemp(prefix="everstep-corpus-"))
        self.steps = options.steps
        self.step = 0
        self.workers = 0
        self.trap: Callable[[], Any] | None = None
        self.loss: Any = None
        injection = injections().get((options.fault, options.variant))
        is_mine = injection is not None and (injection.runs_everywhere or self.is_culprit)
        self._injection = injection if is_mine else None

    @property
    def is_culprit(self) -> bool:
        return self.rank == self.culprit

    @property
    def neighbour(self) -> int:
        """The rank after the culprit."""
        return (self.culprit + 1) % self.world

    def tell(self, text: str) -> None:
        """Say how far this rank is: on stdout, and in a file that can be watched."""
        print(f"rank {self.rank} {text}", flush=True)
        with (self.folder / f"progress_{self.rank}").open("a") as file:
            file.write(f"{text}\n")

    def run(self) -> None:
        self._inject("start")
        self.start()
        self._inject("prepare")
        loader = self._loader()
        self.tell("begins")
        for step in range(1, self.steps + 1):
            self.step = step
            self._next = loader
            self._do("load", self.load)
            self._do("forward", self.forward)
            self._do("backward", self.backward)
            self._do("optimize", self.optimize)
            self._do("metrics", self.metrics)
            self._do("save", self.save)
            self.tell(f"step {step}")
        self.finish()

    def _inject(self, hook: Hook) -> None:
        """What goes wrong before the first step."""
        if self._injection is not None and self._injection.hook == hook:
            if hook != "prepare":  # a trap is announced when it springs
                self.tell(f"fault in {hook}")
            self._injection.run(self)

    def _do(self, hook: Hook, usual: Callable[[], None]) -> None:
        """A part of a step, or what goes wrong instead of it."""
        injection = self._injection
        if injection is None or injection.hook != hook or self.step != self.at:
            usual()
            return
        self.tell(f"fault in {hook}")
        injection.run(self)

    def start(self) -> None:
        import torch
        import torch.distributed as dist

        torch.manual_seed(0)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(hours=2))
        everyone = list(range(self.world))
        self.metrics_group = dist.new_group(everyone, group_desc="metrics")
        self.other_group = dist.new_group(everyone, group_desc="other")
        net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.net = torch.nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    def _loader(self) -> Iterator[Any]:
        from torch.utils.data import DataLoader

        trapped = _BATCH * (self.at - 1)
        samples: Any = Samples(_BATCH * self.steps, self._spring, trapped)
        return iter(DataLoader(samples, batch_size=_BATCH, num_workers=self.workers))

    def _spring(self) -> None:
        if self.trap is not None:
            self.tell("fault in the data")
            self.trap()

    def load(self) -> None:
        self.batch = next(self._next)

    def forward(self) -> None:
        self.loss = self.net(self.batch).square().mean()

    def backward(self) -> None:
        self.loss.backward()

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def metrics(self) -> None:
        """The mean loss of all ranks."""
        import torch.distributed as dist

        loss = self.loss.detach().clone().reshape(1)
        dist.all_reduce(loss, group=self.metrics_group)

    def save(self) -> None:
        """Rank 0 writes; all wait for it."""
        import torch
        import torch.distributed as dist

        if self.rank == 0 and self.step % 2 == 0:
            torch.save(self.net.state_dict(), self.folder / "model.pt")
        dist.barrier(group=self.other_group)

    def finish(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        del self.net  # before its group: otherwise torch may hang
        dist.destroy_process_group()
        self.tell("done")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--fault", default="none", help="as in faults.py; none: a healthy run")
    words.add_argument("--variant", type=int, default=0)
    words.add_argument("--seed", type=int, default=0, help="draws the rank and the step")
    words.add_argument("--steps", type=int, default=STEPS)
    words.add_argument("--folder", help="where files go; by default a temporary one of each rank")
    options = words.parse_args()
    variants = sorted(number for name, number in injections() if name == options.fault)
    if options.fault != "none" and options.variant not in variants:
        names = ", ".join(sorted({name for name, _ in injections()}))
        words.error(
            f"--variant {options.variant}: {options.fault} has {variants[0]} to {variants[-1]}"
            if variants
            else f"--fault {options.fault} is not known; there are {names}"
        )
    CorpusTraining(options).run()


if __name__ == "__main__":
    main()
