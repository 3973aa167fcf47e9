"""A small training whose losses depend on each random number that a real one draws.

Dropout draws in the training; the data set draws from Python, NumPy or torch for each sample, in
the training or in workers of its loader. Losses are compared bit for bit.
"""

import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from trainer_sdk.checkpoint.data import PerRank, PositionedSampler, RngState

SIZE, BATCH, LAST = 22, 4, 17
"""An epoch has five batches and a half: three epochs and more; of two ranks six."""
DRAWS: dict[str, Callable[[], float]] = {
    "none": lambda: 0.0,
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
    "all": lambda: random.random() + float(np.random.rand()) + float(torch.rand(())),
}
HAS_TORCHDATA = find_spec("torchdata") is not None


class Case(NamedTuple):
    """A cell of the table."""

    loader: str = "positioned"
    workers: int = 0
    draws: str = "none"
    dropout: float = 0.5
    shuffle: bool = True
    drop_last: bool = False
    persistent: bool = False
    ranks: int = 1
    buckets: str = "made_anew"
    """Of DDP: made anew after the first backward, `kept`, or made `before` the restore."""

    @property
    def epoch(self) -> int:
        """The batches of an epoch on each rank, where a loader ends with the epoch."""
        samples = SIZE // self.ranks
        return samples // BATCH if self.drop_last else -(-samples // BATCH)


class Samples(Dataset[torch.Tensor]):
    """Samples that are made at random, as images are cropped."""

    def __init__(self, draws: str) -> None:
        self.values: torch.Tensor = torch.arange(SIZE * 8.0).view(SIZE, 8).sin()
        self.draws = draws

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index].add(DRAWS[self.draws]())


class Training:
    """Begins alike each time, as a script does; `state` is what is saved."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(5)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(case.dropout), torch.nn.Linear(16, 1)
        )
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(5 + self.rank)
        self.model: torch.nn.Module = model
        if case.ranks > 1:
            keeps = case.buckets == "kept"
            self.model = DistributedDataParallel(model, find_unused_parameters=keeps)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if case.buckets == "before":
            self.model(torch.zeros(1, 8)).sum().backward()
            self.optimizer.zero_grad()
        self.losses: dict[int, str] = {}
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.state["random"] = RngState()
        self._begin: Any = getattr(self, f"_{case.loader}")(Samples(case.draws))

    def steps(self, step: int) -> Iterator[int]:
        """Go on after this step; each step that is made."""
        for batch in self._begin(step):
            step += 1
            self.make(step, batch)
            yield step
            if step == LAST:
                return

    def make(self, step: int, batch: torch.Tensor) -> None:
        """Make a step."""
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[step] = loss.item().hex()

    @property
    def _options(self) -> dict[str, Any]:
        return {"num_workers": self.case.workers, "persistent_workers": self.case.persistent}

    def _positioned(self, data: Samples, loader: Any = DataLoader) -> Any:
        sampler = PositionedSampler(SIZE, batch_size=BATCH, seed=3, shuffle=self.case.shuffle)
        self.state["data"] = sampler
        self.loader = batches = loader(data, batch_sampler=sampler, **self._options)
        return lambda step: sampler.counted(batches)

    def _positioned_stateful(self, data: Samples) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return self._positioned(data, StatefulDataLoader)

    def _stateful(self, data: Samples) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        batches = self._by_epochs(data, StatefulDataLoader, StatefulDistributedSampler)
        self.state["data"] = PerRank(batches)
        # Saved after the last batch of an epoch, it goes on at the end of that epoch.
        return lambda step: self._epochs(batches, max(step - 1, 0))

    def _plain(self, data: Samples) -> Any:
        """It has no position: such a training is saved between epochs only."""
        batches = self._by_epochs(data, DataLoader, DistributedSampler)
        return lambda step: self._epochs(batches, step)

    def _by_epochs(self, data: Samples, loader: Any, sampler_class: Any) -> Any:
        options = self._options | {"batch_size": BATCH, "drop_last": self.case.drop_last}
        if self.case.ranks > 1:
            options["sampler"] = sampler_class(data, shuffle=self.case.shuffle)
        else:
            options["shuffle"] = self.case.shuffle
        self.loader = loader(data, **options)
        return self.loader

    def _epochs(self, batches: Any, step: int) -> Iterator[torch.Tensor]:
        for epoch in count(step // self.case.epoch):
            if self.case.ranks > 1:
                batches.sampler.set_epoch(epoch)
            yield from batches


def differing(found: dict[int, str], undisturbed: dict[int, str]) -> list[int]:
    """The steps whose loss is another one than that of the undisturbed training."""
    return [step for step, loss in found.items() if undisturbed.get(step) != loss]
