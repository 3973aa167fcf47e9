"""Optimizers before their first step: they have no state yet, and need one to load into."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Form = tuple[torch.dtype, tuple[int, ...]]
"""Of a tensor."""


def is_blank(value: object) -> bool:
    """Whether it is an optimizer without a state."""
    return isinstance(value, Optimizer) and not value.state


def give_state(optimizer: Optimizer) -> bool:
    """Let it make its state by a step of zero gradients and no rate, which changes nothing else.

    False where its step needs an argument, or fails: it has no state then. Hooks are passed by:
    nobody may take it for a step of the training. Gradients stay as they are.
    """
    step: Any = type(optimizer).step
    try:
        with _at_rest(optimizer):
            getattr(step, "__wrapped__", step)(optimizer)
    except Exception:  # noqa: BLE001 - a step of the user's may raise anything
        optimizer.state.clear()
        return False
    return True


@contextmanager
def _at_rest(optimizer: Optimizer) -> Generator[None]:
    """Without rates, and with zeros for gradients."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    gradients = [(one, one.grad) for one in _parameters(optimizer)]
    try:
        for parameter, _ in gradients:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter, gradient in gradients:
            parameter.grad = gradient


def state_like(optimizer: Optimizer, saved: Mapping[str, Form | None]) -> dict[int, dict[str, Any]]:
    """A state as `state_dict` has it, to load into, from the keys that were saved in one.

    `saved` has the form of each tensor, and None for another value.
    """
    parameters = _parameters(optimizer)
    tree: dict[Any, Any] = {}
    for key, form in saved.items():
        number, *path = (int(one) if one.isdigit() else one for one in key.split("."))
        if not isinstance(number, int) or number >= len(parameters) or not path:
            continue
        holder = tree.setdefault(number, {})
        for one in path[:-1]:
            holder = holder.setdefault(one, {})
        holder[path[-1]] = None if form is None else _zeros(form, parameters[number])
    return {
        number: {name: _with_lists(one) for name, one in values.items()}
        for number, values in tree.items()
    }


def _zeros(form: Form, parameter: torch.Tensor) -> torch.Tensor:
    """Sharded as its parameter where it has the same shape."""
    dtype, shape = form
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        if shape in (tuple(parameter.shape), tuple(local.shape)):
            return torch.zeros_like(parameter.detach(), dtype=dtype)
        parameter = local
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _with_lists(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    inner = {name: _with_lists(one) for name, one in values.items()}
    if inner.keys() == set(range(len(inner))):
        return [inner[number] for number in range(len(inner))]
    return inner


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
