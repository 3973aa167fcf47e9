"""The random numbers of a loader and its workers, so that a training continues exactly."""

import random
import sys
from typing import Any

import torch
import xxhash
from torch.utils.data import get_worker_info


class LoadersDraw:
    """What a loader draws between its iterator of a sampler and its first batch.

    An interrupted training draws it once more, in the middle of the stream.
    """

    def __init__(self) -> None:
        self._before: torch.Tensor | None = None

    def may_follow(self) -> None:
        """A loader asks for an iterator; with workers it does so twice, and draws in between."""
        self.take_back()
        self._before = torch.get_rng_state()

    def take_back(self) -> None:
        """Put the generator back; one that anything else has moved stays as it is."""
        before, self._before = self._before, None
        if before is None:
            return
        drawn = torch.Generator("cpu")
        drawn.set_state(before)
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=drawn)
        if torch.equal(drawn.get_state(), torch.get_rng_state()):
            torch.set_rng_state(before)


class SeededBatch(list[Any]):
    """The samples of a batch, or a single one; they seed the worker that receives them."""

    def __init__(self, samples: Any, seed: str) -> None:
        super().__init__(samples if isinstance(samples, list) else [samples])
        self._sent = samples, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._sent


def _received(samples: Any, seed: str) -> Any:
    """The samples of a batch; if a worker receives them, they seed its generators."""
    if get_worker_info() is not None:
        digest = xxhash.xxh64_intdigest(seed.encode())
        random.seed(digest)
        torch.manual_seed(digest)
        if "numpy" in sys.modules:  # of the upper bits: the generator of both is the same
            sys.modules["numpy"].random.seed(digest >> 32)
    return samples
