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
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.loader_seeds import LoadersDraw, SeededBatch
from trainer_sdk.sdk_log import warn_once
from trainer_sdk.survive.share import BatchShare, own_place

Batch = TypeVar("Batch")


class Resumable(Protocol):
    """An object that knows its position, as a `StatefulDataLoader`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class PerRank:
    """A state that differs between ranks, as that of a `StatefulDataLoader`; saved as one value.

    It fits only the same world size: a restore with another world size is refused, as samples would
    be lost or repeated. Make it before the loader's first iterator: from then on each batch of a
    map-style data set seeds the worker that loads it, and the seed that the loader draws does not
    move the generator of the training. A `StatefulDataLoader` alone continues neither.
    """

    of_one_world = True
    is_data_position = True

    def __init__(self, inner: Resumable) -> None:
        self.given = self.passes = 0
        """How many batches `Batches` has given, and how many passes over all it has begun."""
        self.epoch: int | None = None
        """The epoch of the loader's sampler in the last of those passes, if it has one."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(inner, method, None)):
                raise TypeError(f"inner must have a {method}, and is {arguments.shown(inner)}")
        self._inner = inner
        self._key = _own_key()
        self._seeded = _make_exact(inner) if isinstance(inner, DataLoader) else None

    def state_dict(self) -> dict[str, Any]:
        """The state, as one value."""
        # torchdata's loader would begin here, before the script has said which epoch it is.
        loaded = getattr(self._inner, "next_iter_state", None)
        inner = self._inner.state_dict() if loaded is None else loaded
        place = (self.given, self.passes, self.epoch) if self.given else ()
        return {self._key: (inner, *place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state."""
        inner, *place = state[self._key]
        self.given, self.passes, self.epoch = place or (0, 0, None)
        self._inner.load_state_dict(inner)

    def is_of(self, batches: object) -> bool:
        """Whether this is the state of these batches."""
        return self._inner is batches

    def drop(self, batches: Iterator[Any]) -> None:
        """Pass over the next batch, as if it had not been loaded.

        Its order was drawn, which stays; what its samples have drawn in this process does not.
        """
        seeded = self._seeded
        if seeded is not None and seeded.num_workers:
            next(batches)  # its samples were loaded elsewhere
        else:
            states = [RngState().state_dict()]
            if seeded is not None:
                seeded.dropping = states
            try:
                next(batches)
            finally:
                if seeded is not None:
                    seeded.dropping = None
                RngState().load_state_dict(states[-1])
        self.given += 1


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
    `DataLoader` as `batch_sampler`. Each batch seeds the worker that loads it by its position, and
    the seed that a loader draws for its workers does not move the generator of the training.
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
        self._follows_group = place is None
        self._take_place(*(own_place() if place is None else place))
        self._part = 0
        """The next batch of the present step."""
        self._consumed = 0
        self._given = 0
        self._loads = 0
        self._draw = LoadersDraw()
        self._is_counted = False
        self._order: tuple[int, torch.Tensor] | None = None
        self._skipped: list[tuple[int, int]] = []

    def _take_place(self, rank: int, world_size: int) -> None:
        world_size = arguments.whole("place", world_size, 1)
        rank = arguments.whole("place", rank, 0, world_size - 1)
        self._place = rank, world_size
        self._of_all = self._batch_size * world_size
        self._parts = [(rank * self._batch_size, self._batch_size)]
        """Where this rank's batches of a step begin in all the samples of the step; their sizes."""

    @property
    def consumed(self) -> int:
        """The position in the stream: the samples before it are used, or passed over."""
        return self._consumed

    @property
    def begins_at(self) -> int:
        """The position of the next sample that is used."""
        return self._after(self._consumed, 1) - 1

    def divide(self, share: BatchShare) -> None:
        """Give the micro-batches of a share from now on, whatever the batch size was."""
        self._parts = [(micro.offset, micro.size) for micro in share]
        self._of_all = share.global_batch
        self._follows_group = False
        self._part = 0
        self._loads += 1

    def skip(self, spans: Iterable[tuple[int, int]]) -> None:
        """Pass over these positions `[from, to)`, now and at any later call of the same spans.

        An iterator that was made before has read ahead: make it anew.
        """
        self._skipped = sorted(spans)
        self._loads += 1

    def go_to(self, consumed: int) -> None:
        """Set the position, while the iterator that has read ahead stays."""
        self._consumed = consumed

    @property
    def epoch(self) -> int:
        """The present pass over the samples, from 0 up."""
        return self._consumed // self._size

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank from the present position; loaders take some in advance."""
        self._draw.may_follow()
        if self._follows_group:  # it may be another than when the sampler was made
            self._take_place(*own_place(self._place))
        return self._batches()

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches; each counts as used once it is yielded."""
        self._is_counted = True
        for batch in batches:
            self.advance()
            yield batch

    def advance(self) -> None:
        """Count a batch on each rank as used."""
        self._part = (self._part + 1) % len(self._parts)
        if not self._part:
            self._consumed = self._after(self._consumed, self._of_all)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, and the values that identify the stream."""
        if self._given and not (self._consumed or self._is_counted):
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
        self._consumed, self._part = state["place"][0], 0
        self._loads += 1

    def _batches(self) -> Iterator[list[int]]:
        self._draw.take_back()
        at, part, loads = self._consumed, self._part, self._loads
        while loads == self._loads:
            self._given += 1
            offset, size = self._parts[part]
            begin = self._after(at, offset + 1) - 1
            yield SeededBatch(self._samples(begin, size), f"{self._seed}/{begin}")
            part = (part + 1) % len(self._parts)
            at = at if part else self._after(at, self._of_all)
        raise RuntimeError(
            f"the loader's iterator was made at sample {at}, before the position was restored, "
            f"which is {self._consumed}: make it after restore"
        )

    def _after(self, at: int, count: int) -> int:
        """The position after this many samples from `at` on, without those that are skipped."""
        for begin, end in self._skipped:
            if at < end and begin < at + count:
                count -= max(begin - at, 0)
                at = end
        return at + count

    def _samples(self, at: int, size: int) -> list[int]:
        samples: list[int] = []
        while len(samples) < size:
            at = self._after(at, 1) - 1
            stops = [begin for begin, _ in self._skipped if begin > at]
            until = min([at + size - len(samples), *stops])
            epoch, begin = divmod(at, self._size)
            end = min(self._size, begin + until - at)
            if not self._shuffle:
                samples += range(begin, end)
            else:
                samples += self._order_of(epoch)[begin:end].tolist()
            at += end - begin
        return samples

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != epoch:
            # Torch's generator uses 32 bits of its seed.
            mixed = xxhash.xxh32_intdigest(f"{self._seed}/{epoch}".encode())
            generator = torch.Generator("cpu").manual_seed(mixed)
            self._order = epoch, torch.randperm(self._size, generator=generator, device="cpu")
        return self._order[1]


class _SeededBatches:
    """The batches of a loader that keeps its own position; each seeds its worker by its number.

    Those of an iterable data set do not, as the data set continues by itself.
    """

    def __init__(self, batches: Any, *, is_seeding: bool, num_workers: int) -> None:
        self.batches = batches
        self.num_workers = num_workers
        self.dropping: list[dict[str, Any]] | None = None
        """Gets the generators' states once the order of a dropped batch is drawn."""
        self.is_seeding = is_seeding
        self.draw = LoadersDraw()
        self.given = 0
        self.seed = f"{_own_key()}/{torch.initial_seed()}"

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def __iter__(self) -> "_SeededIterator":
        self.draw.may_follow()
        return _SeededIterator(self)


class _SeededIterator:
    """One pass; its state also has what the loader would keep of the batches."""

    def __init__(self, seeded: _SeededBatches) -> None:
        self._seeded = seeded
        self._batches: Any = iter(seeded.batches)
        self._passed = 0

    def __iter__(self) -> "_SeededIterator":
        return self

    def __next__(self) -> Any:
        self._seeded.draw.take_back()
        batch = next(self._batches)
        if self._seeded.dropping is not None:
            self._seeded.dropping.append(RngState().state_dict())
        self._passed += 1
        self._seeded.given += 1
        if not self._seeded.is_seeding:
            return batch
        return SeededBatch(batch, f"{self._seeded.seed}/{self._seeded.given}")

    def state_dict(self) -> dict[str, Any]:
        """The position, and the seed of the batches."""
        parts = {"sampler": self._seeded.batches, "pass": self._batches}
        states = {name: part.state_dict() for name, part in parts.items() if _has_state(part)}
        return states | {
            "passed": self._passed,
            "given": self._seeded.given,
            "seed": self._seeded.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state, or from one without seeds."""
        if "seed" not in state:
            self._batches.load_state_dict(state)
            return
        self._passed, self._seeded.given = state["passed"], state["given"]
        self._seeded.seed = state["seed"]
        if "sampler" in state:
            self._seeded.batches.load_state_dict(state["sampler"])
            self._batches = iter(self._seeded.batches)
        if "pass" in state:
            self._batches.load_state_dict(state["pass"])
        elif "sampler" not in state:
            self._batches = islice(self._batches, self._passed, None)


def has_position(state: Iterable[object]) -> bool:
    """Whether any of these objects has the position in the data."""
    return any(getattr(part, "is_data_position", False) for part in state)


def _has_state(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _make_exact(loader: "DataLoader[Any]") -> _SeededBatches:
    """Have a loader continue as if it had not been interrupted."""
    if getattr(loader.batch_sampler, "is_data_position", False):
        raise TypeError(
            "the loader's batch_sampler is a PositionedSampler, which keeps the position: put the "
            "sampler into the state, not the loader"
        )
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    is_seeding = loader.num_workers > 0 and not isinstance(loader.dataset, IterableDataset)
    batches = _SeededBatches(
        getattr(loader, name), is_seeding=is_seeding, num_workers=loader.num_workers
    )
    # Torch lets nobody replace it, since a loader would not notice; this one passes all on.
    object.__setattr__(loader, name, batches)
    return batches


def _own_key() -> str:
    rank, world_size = own_place()
    return f"rank-{rank}-of-{world_size}"
