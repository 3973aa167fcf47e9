"""The position in the data and the random numbers, as parts of the state that is saved.

sampler = PositionedSampler(len(dataset), batch_size=8, seed=1)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
state = {"model": model, "optimizer": optimizer, "data": sampler, "random": RngState()}
saves.restore(state)
for batch in sampler.counted(loader):
    ...
    saves.step(step, state)
"""

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import xxhash

from trainer_sdk.checkpoint import arguments
from trainer_sdk.sdk_log import warn_once

Batch = TypeVar("Batch")


class Resumable(Protocol):
    """An object that knows its position, as a `StatefulDataLoader`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class PerRank:
    """A state that differs between ranks, as that of a `StatefulDataLoader`; saved as one value.

    It fits only the same world size: a restore with another world size is refused, as samples would
    be lost or repeated.
    """

    of_one_world = True
    is_data_position = True

    def __init__(self, inner: Resumable) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(inner, method, None)):
                raise TypeError(f"inner must have a {method}, and is {arguments.shown(inner)}")
        self._inner = inner
        self._key = _own_key()

    def state_dict(self) -> dict[str, Any]:
        """The state, as one value."""
        return {self._key: (self._inner.state_dict(),)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state."""
        self._inner.load_state_dict(state[self._key][0])


class RngState:
    """The random numbers of Python, numpy, torch and the current CUDA device, on each rank.

    A restore with another world size keeps the generators as the script has seeded them.
    """

    may_be_absent = True

    def __init__(self) -> None:
        self._key = _own_key()
        self._asked: object = None

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators."""
        generators: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            name, keys, *rest = sys.modules["numpy"].random.get_state()
            generators["numpy"] = (name, keys.tobytes(), *rest)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            generators["cuda"] = torch.cuda.get_rng_state()
        self._asked = (generators,)
        return {self._key: self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state."""
        whole = state[self._key]
        if whole is self._asked:
            warn_once(
                "random numbers continue as the script has seeded them: they were saved with "
                "another world size"
            )
            return
        generators = whole[0]
        random.setstate(generators["python"])
        torch.set_rng_state(generators["torch"])
        if "numpy" in generators and "numpy" in sys.modules:
            numpy: Any = sys.modules["numpy"]
            name, keys, *rest = generators["numpy"]
            numpy.random.set_state((name, numpy.frombuffer(keys, dtype="uint32"), *rest))
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["cuda"])


class PositionedSampler:
    """Batches of one endless stream of samples: each epoch in its own order, without gaps.

    All ranks share the stream, and the position is one number, so an interrupted training uses the
    same samples as an uninterrupted one, also with another world or batch size. Give it to a
    `DataLoader` as `batch_sampler`.
    """

    is_data_position = True

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        place: tuple[int, int] | None = None,
    ) -> None:
        self._size = arguments.whole("size", size, 1)
        self._batch_size = arguments.whole("batch_size", batch_size, 1)
        self._seed = arguments.whole("seed", seed, -(1 << 63))
        self._shuffle = arguments.truth("shuffle", shuffle)
        rank, world_size = _place() if place is None else place
        self._world_size = arguments.whole("place", world_size, 1)
        self._rank = arguments.whole("place", rank, 0, self._world_size - 1)
        self._consumed = 0
        self._given = 0
        self._order: tuple[int, torch.Tensor] | None = None

    @property
    def consumed(self) -> int:
        """The number of samples that all ranks together have used."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """The present pass over the samples, from 0 up."""
        return self._consumed // self._size

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank from the present position; loaders take some in advance."""
        at = self._consumed
        while True:
            self._given += 1
            yield self._samples(at + self._rank * self._batch_size)
            at += self._batch_size * self._world_size

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches; each counts as used once it is yielded."""
        for batch in batches:
            self.advance()
            yield batch

    def advance(self) -> None:
        """Count a batch on each rank as used."""
        self._consumed += self._batch_size * self._world_size

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, and the values that identify the stream."""
        if self._given and not self._consumed:
            warn_once(
                "the sampler's batches are not counted, and a restart would repeat them: iterate "
                "over sampler.counted(loader)"
            )
        return {"place": (self._consumed, self._size, self._seed, self._shuffle)}

    def why_unfit(self, state: dict[str, Any]) -> str:
        """Why this sampler cannot continue from a state; empty if it can. A restore asks first."""
        saved, present = tuple(state["place"][1:]), (self._size, self._seed, self._shuffle)
        if saved == present:
            return ""
        return (
            f"the data was (size, seed, shuffle) = {saved} when it was saved, and is {present} "
            "now: give the same values, or leave the sampler out of the state to begin again"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state."""
        why = self.why_unfit(state)
        if why:
            raise ValueError(why)
        self._consumed = state["place"][0]

    def _samples(self, at: int) -> list[int]:
        samples: list[int] = []
        while len(samples) < self._batch_size:
            epoch, begin = divmod(at + len(samples), self._size)
            if not self._shuffle:
                end = min(self._size, begin + self._batch_size - len(samples))
                samples += range(begin, end)
            else:
                order = self._order_of(epoch)
                samples += order[begin : begin + self._batch_size - len(samples)].tolist()
        return samples

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            # Torch's generator uses 32 bits of its seed.
            mixed = xxhash.xxh32_intdigest(f"{self._seed}/{epoch}".encode())
            generator = torch.Generator("cpu").manual_seed(mixed)
            self._order = epoch, torch.randperm(self._size, generator=generator, device="cpu")
        return self._order[1]


def has_position(state: Iterable[object]) -> bool:
    """Whether any of these objects has the position in the data."""
    return any(getattr(part, "is_data_position", False) for part in state)


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _own_key() -> str:
    rank, world_size = _place()
    return f"rank-{rank}-of-{world_size}"
