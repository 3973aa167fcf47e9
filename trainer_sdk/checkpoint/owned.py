"""Which tensors only optimizers change: they stay as they are until the next step of one."""

from collections.abc import Iterable
from typing import Any

import torch


class Owned:
    """What only optimizers change, between their steps."""

    def __init__(self) -> None:
        self._optimizers: list[Any] = []
        self._known: dict[str, tuple[int, bool]] = {}
        """Where each tensor was when it was last asked for, and the answer."""
        self._storages: set[int] | None = None

    def add(self, optimizers: Iterable[Any]) -> list[Any]:
        """More of them; those that were not known."""
        new = [one for one in optimizers if not any(one is known for known in self._optimizers)]
        self._optimizers += new
        if new:
            self._known.clear()
        self._storages = None
        return new

    def has(self, key: str, source: torch.Tensor) -> bool:
        """Whether an optimizer owns it, and any other change would be seen."""
        address = source.data_ptr()
        before = self._known.get(key)
        if before is not None and before[0] == address:
            return before[1]
        if self._storages is None:
            self._storages = _storages_of(self._optimizers)
        found = not source.is_inference() and _storage(source) in self._storages
        self._known[key] = address, found
        return found


def _storages_of(optimizers: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(_storage(one) for one in group["params"])
        for state in optimizer.state.values():
            found.update(_storage(one) for one in state.values() if isinstance(one, torch.Tensor))
    return found


def optimizers_in(state: Iterable[object]) -> list[Any]:
    """The optimizers among these objects."""
    return [one for one in state if hasattr(one, "register_step_pre_hook")]


def _storage(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())
