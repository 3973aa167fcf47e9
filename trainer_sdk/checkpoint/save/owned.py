"""Which tensors only optimizers change: they stay as they are until the next step of one."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class Owned:
    """What only optimizers change, between their steps. It keeps none of them from going."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Any]] = []
        self._known: dict[str, tuple[int, bool]] = {}
        """Where each tensor was when it was last asked for, and the answer."""
        self._storages: set[int] | None = None

    def add(self, optimizers: Iterable[Any]) -> list[Any]:
        """More of them; those that were not known."""
        alive = self._alive()
        new = [one for one in optimizers if not any(one is known for known in alive)]
        if new or len(alive) < len(self._optimizers):
            self._known.clear()  # also of memory that is another tensor's now
        self._optimizers = [weakref.ref(one) for one in (*alive, *new)]
        self._storages = None
        return new

    def has(self, key: str, source: torch.Tensor) -> bool:
        """Whether an optimizer owns it, and any other change would be seen."""
        address = source.data_ptr()
        before = self._known.get(key)
        if before is not None and before[0] == address:
            return before[1]
        if self._storages is None:
            self._storages = _storages_of(self._alive())
        found = not source.is_inference() and _storage(source) in self._storages
        self._known[key] = address, found
        return found

    def _alive(self) -> list[Any]:
        return [one for known in self._optimizers if (one := known()) is not None]


def _storages_of(optimizers: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(_storage(one) for one in group["params"])
        for state in optimizer.state.values():
            found.update(_storage(one) for one in state.values() if isinstance(one, torch.Tensor))
    return found


def optimizers_in(state: Iterable[object]) -> list[Any]:
    """The optimizers among these objects; not what is around one and takes no hooks itself."""
    return [one for one in state if _takes_hooks(one)]


def _takes_hooks(found: Any) -> bool:
    try:
        found.register_step_pre_hook(_nothing).remove()
    except AttributeError:
        return False
    return True


def _nothing(*_: object) -> None:
    """A hook."""


def _storage(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())
