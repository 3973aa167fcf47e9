"""The boundary of a step, where the state of a rank is that of one step and of no other.

Between two boundaries only buffers, gradients, random numbers and the position in the data change,
until an optimizer begins its step. A rank whose round ends before that is put back to the last
boundary; after that its state is torn until the next boundary, and it needs that of a replica. All
generators are seeded at each boundary by rank and step, so a new process draws the same numbers.
"""

import copy
import random
import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainer_sdk.numerics.snapshot import KeptBuffer, TrainingParts, put_back_buffers

_HALF = 32
"""numpy's old generator has seeds of 32 bits."""


class RoundOver(BaseException):
    """Raised by `run.step()` once the round has ended; `survive` catches it."""


class Boundary:
    """The step that this rank's state belongs to."""

    def __init__(
        self,
        seed: int,
        is_over: Callable[[], bool],
        ends_soon: Callable[[], bool] = lambda: False,
    ) -> None:
        self.step: int | None = None
        """The last finished step of the state; None before a state was agreed."""
        self.is_torn = False
        """Whether the state is a mixture of two steps."""
        self.made_in = 0
        """The round in which the state was made or loaded; 0 for none."""
        self.rank = self.round = 0
        self._seed = seed
        self.step_s = 0.0
        """How long the last step took."""
        self._finished_at = monotonic()
        self._is_over = is_over
        self._ends_soon = ends_soon
        self._parts: TrainingParts | None = None
        self._positions: list[Any] = []
        self._buffers: list[KeptBuffer] = []
        self._places: list[Any] = []
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    def tear(self) -> None:
        """Note that the state begins to change."""
        self.is_torn = True

    def begin(self, state: Mapping[str, Any], step: int, made_in: int) -> None:
        """Note that this state is that of a step, on all ranks, and begin the next step."""
        self._parts = TrainingParts(state)
        self._positions = [
            part for part in state.values() if getattr(part, "is_data_position", False)
        ]
        for parameter in self._parts.parameters():
            parameter.grad = None
        for scaler in self._parts.scalers:
            scaler._per_optimizer_states.clear()  # noqa: SLF001 - of a step that was interrupted
        self.step, self.made_in, self.is_torn = step, made_in, False
        self._finished_at = monotonic()
        self._keep()
        self._seed_by(f"{self.rank}/{self.step}")

    def finished(self, step: int) -> None:
        """Note that a step is finished; `RoundOver` if the round is."""
        self.step, self.made_in, self.is_torn = step, self.round, False
        self._keep()
        now = monotonic()
        self.step_s, self._finished_at = now - self._finished_at, now
        if self._is_over() or self._ends_soon():
            raise RoundOver
        self._seed_by(f"{self.rank}/{self.step}")

    def moved(self, step: int) -> None:
        """Note that the training has loaded the state of another step on all ranks."""
        if self._parts is not None and step != self.step:
            self.step, self.made_in, self.is_torn = step, self.round, False
            self._keep()

    def put_back(self) -> None:
        """Make a state that is not torn what it was at the boundary."""
        if self.is_torn:
            return
        put_back_buffers(self._buffers)
        for part, place in zip(self._positions, self._places, strict=True):
            part.load_state_dict(place)

    def seed_build(self) -> None:
        """Seed all generators as for any other call of `build`, on each rank."""
        self._seed_by("build")

    def forget(self, *, has_state: bool) -> None:
        """Drop all references to the state; without `has_state` this process is as a new one."""
        self._parts = None
        self._positions, self._buffers, self._places = [], [], []
        if not has_state:
            self.step, self.is_torn, self.made_in = None, False, 0

    def close(self) -> None:
        """Watch optimizers no longer."""
        self._hook.remove()

    def _seed_by(self, moment: str) -> None:
        seed = xxhash.xxh64_intdigest(f"{self._seed}/{moment}".encode())
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed >> _HALF)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(seed)

    def _before_optimizer(self, *_: object) -> None:
        """Tear the state; `RoundOver` while it is whole, if the round has ended."""
        if self.is_torn:
            return
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # An aborted collective leaves wrong gradients, which a kernel that waits would use.
            torch.cuda.current_stream().synchronize()
        if self._is_over():
            raise RoundOver
        self.is_torn = True

    def _keep(self) -> None:
        assert self._parts is not None, "a step is finished after a state was agreed"
        self._buffers = self._parts.buffers(again=True)
        self._places = [copy.deepcopy(part.state_dict()) for part in self._positions]
