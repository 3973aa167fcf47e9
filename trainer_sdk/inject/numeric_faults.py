"""Faults in what a rank computes, made by hooks that torch calls for all modules and optimizers.

So the script needs no change. A fault acts in forward passes with gradients only, and in the
outermost module that the script calls: its names of parameters and modules are those of targets,
without the prefixes of wrappers as DDP.
"""

import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import (
    Module,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainer_sdk.inject.catalog import FaultRequest
from trainer_sdk.sdk_log import warn

_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)"
)
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def make(wish: FaultRequest) -> None:
    """Make the fault at its next opportunity; in the main thread."""
    if wish.fault.name == "poison_batch":
        _poison_next_batch(wish.amount)
    else:
        _ArmedFault(wish)


class _ArmedFault:
    """A fault that waits for its opportunity, or for each of a time."""

    def __init__(self, wish: FaultRequest) -> None:
        self._fault = wish.fault.name
        self._amount = wish.amount
        self._name, _, index = wish.target.partition(":")
        self._index = int(index) if index else None
        self._ends = None if wish.for_s is None else time.monotonic() + wish.for_s
        self._stuck: bool | None = None
        self._place: tuple[torch.Tensor, ...] = ()
        self._model: Module | None = None
        self._owner: Module | None = None
        self._attribute = ""
        self._is_told = self._has_complained = False
        self._hooks: list[Any] = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward),
        ]
        self._on_gradient: Any = None

    def _before_forward(self, module: Module, _: object) -> None:
        if self._ends is not None and time.monotonic() > self._ends:
            self._disarm()
        if not self._hooks or not torch.is_grad_enabled() or not self._is_outermost(module):
            return
        if self._fault == "flip_reduced_gradient" and self._model is None:
            # Not when the fault is injected: torch may be calling these hooks just then.
            self._hooks.append(register_optimizer_step_pre_hook(self._before_optimizer))
        self._model, self._owner = module, None
        if self._fault in {"flip_activation", "scale_activation", "nan_activation"}:
            names = {_plain(name): inner for name, inner in module.named_modules()}
            self._owner = names.get(_plain(self._name))
            self._complain_unless(self._owner is not None, "module", names)
            return
        parameter = self._parameter(module)
        if parameter is not None and self._fault == "flip_parameter":
            self._flip(_local(parameter).data)

    def _is_outermost(self, module: Module) -> bool:
        """False also where a layer is computed a second time during the backward pass."""
        if self._model is not None and module in set(self._model.modules()) - {self._model}:
            return False
        callers = traceback.walk_stack(sys._getframe())  # noqa: SLF001
        code = Module._call_impl.__code__  # noqa: SLF001
        return sum(frame.f_code is code for frame, _ in callers) == 1

    def _parameter(self, model: Module) -> torch.nn.Parameter | None:
        """The parameter to harm; this remembers its owner."""
        wished = _plain(self._name)
        names = dict(model.named_parameters())
        for name, parameter in names.items():
            fits = parameter.requires_grad and parameter.is_floating_point()
            if _plain(name) == wished or (not wished and fits and _local(parameter).numel()):
                owner, _, self._attribute = name.rpartition(".")
                self._owner = model.get_submodule(owner)
                return parameter
        self._complain_unless(is_there=False, kind="parameter", names=map(_plain, names))
        return None

    def _complain_unless(self, is_there: bool, kind: str, names: Any) -> None:
        if not is_there and not self._has_complained:
            self._has_complained = True
            there = ", ".join(list(names)[:20])
            warn(f"{self._fault} waits: the model has no {kind} {self._name!r}, it has {there}")

    def _after_forward(self, module: Module, _: object, result: Any) -> None:
        if module is not self._owner or not self._hooks or not torch.is_grad_enabled():
            return
        if self._fault == "flip_gradient":
            # Here FSDP still shows the parameter as autograd knows it.
            leaf = module._parameters[self._attribute]  # noqa: SLF001
            if leaf is not None and leaf.requires_grad:
                if self._on_gradient is not None:
                    self._on_gradient.remove()
                handle = leaf.register_hook(self._of_gradient)  # type: ignore[no-untyped-call]
                # Before all hooks that look at the gradient: it was computed wrongly.
                others: Any = leaf._backward_hooks  # noqa: SLF001
                first = {handle.id: others.pop(handle.id), **others}
                others.clear()
                others.update(first)
                self._on_gradient = handle
        elif self._fault.endswith("_activation"):
            # `data` has no history: autograd does not see the change, as of a real fault.
            for values in _tensors(result):
                if values.is_floating_point() and values.numel():
                    self._harm_activation(values.data)
                    return

    def _harm_activation(self, values: torch.Tensor) -> None:
        match self._fault:
            case "scale_activation":
                values.mul_(1 + self._amount * 1e-6)
                self._made(f"times {1 + self._amount * 1e-6:g}")
            case "nan_activation":
                values[_at(values, self._index)] = torch.nan
                self._made("an element is NaN")
            case _:
                self._flip(values)

    def _of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self._hooks:
            return gradient
        harmed = gradient.detach().clone()
        self._flip(_local(harmed))
        return harmed

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        parameter = None if self._model is None else self._parameter(self._model)
        is_its = any(parameter is it for group in optimizer.param_groups for it in group["params"])
        if self._hooks and is_its and parameter is not None and parameter.grad is not None:
            self._flip(_local(parameter.grad).data)

    def _flip(self, values: torch.Tensor) -> None:
        """Flip the bit; a bit of a parameter that is flipped again and again is stuck instead."""
        if not values.numel():
            return  # this rank has no part of it
        whole = _WHOLE[values.element_size()]
        width = 8 * values.element_size()
        shift = width - 1 - min(self._amount, width - 1)
        mask = -(1 << shift) if shift == width - 1 else 1 << shift
        place = self._place if self._stuck is not None else _at(values, self._index)
        before = float(values[place])
        bits = int(values[place].view(whole))
        if bool(bits & mask) != self._stuck:
            bits ^= mask
        if self._fault == "flip_parameter":
            self._stuck, self._place = bool(bits & mask), place
        values[place] = torch.tensor(bits, dtype=whole).view(values.dtype)
        self._made(f"{before:g} is now {float(values[place]):g}")

    def _made(self, change: str) -> None:
        if not self._is_told:
            self._is_told = True
            warn(f"{self._fault} of {self._name or self._attribute or 'the model'}: {change}")
        if self._ends is None:
            self._disarm()

    def _disarm(self) -> None:
        # A hook of optimizers may be running, and cannot be taken away then: it does nothing more.
        for hook in self._hooks[:2]:
            hook.remove()
        if self._on_gradient is not None:
            self._on_gradient.remove()
        self._hooks, self._on_gradient, self._model, self._owner = [], None, None, None


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name).lstrip(".")


def _local(values: torch.Tensor) -> torch.Tensor:
    """The values that this rank has, in the same memory."""
    return getattr(values, "_local_tensor", values)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield _local(value)
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def _at(values: torch.Tensor, index: int | None) -> tuple[torch.Tensor, ...]:
    """Where the element with this flat index is; by default the largest element."""
    flat = int(values.float().abs().argmax()) if index is None else index % values.numel()
    return torch.unravel_index(torch.tensor(flat), values.shape)


def _poison_next_batch(factor: int) -> None:
    """Harm the next batch that a DataLoader gives, and this batch again whenever it is given."""
    original: Callable[[Any], Any] = _BaseDataLoaderIter.__next__
    poisoned = b""

    def give(loader: Any) -> Any:
        nonlocal poisoned
        batch = original(loader)
        content = b"".join(map(_bytes, _tensors(batch)))
        poisoned = poisoned or content
        if content and content == poisoned:
            for values in _tensors(batch):
                # In another memory: a batch may be a part of its dataset.
                values.data = (
                    values * factor
                    if values.is_floating_point()
                    else torch.full_like(values, int(values.max()) if values.numel() else 0)
                )
        return batch

    _BaseDataLoaderIter.__next__ = give  # type: ignore[assignment,method-assign]


def _bytes(values: torch.Tensor) -> bytes:
    flat = values.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())
