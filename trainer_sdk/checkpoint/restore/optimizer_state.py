"""The states of optimizers: made to load into, and loaded with their types."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_TEXT_OF_TORCH = "<generator object Optimizer.load_state_dict."
_CAST = (torch.Tensor, str, bytes, bytearray, tuple, set, frozenset, Mapping)
Form = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


def is_blank(value: object) -> bool:
    """Whether it is an optimizer without a state."""
    return isinstance(value, Optimizer) and not value.state


def give_state(optimizer: Optimizer) -> bool:
    """Make an optimizer's state by a step with zero gradients and rates, which changes no value.

    False if the step needs an argument or fails; then the optimizer has no state. Hooks are not
    called, as this is not a step of the training. Gradients stay as they are.
    """
    step: Any = type(optimizer).step
    try:
        with _at_rest(optimizer):
            getattr(step, "__wrapped__", step)(optimizer)
    except Exception:  # noqa: BLE001 - the user's own step may raise anything
        optimizer.state.clear()
        return False
    return True


@contextmanager
def _at_rest(optimizer: Optimizer) -> Generator[None]:
    """Set rates and gradients to zero, and restore them afterwards."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    gradients = [(parameter, parameter.grad) for parameter in _parameters(optimizer)]
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


def state_like(
    optimizer: Optimizer, saved: Mapping[str, Form | None], *, is_zero: bool = True
) -> dict[int, dict[str, Any]]:
    """A state in the form of `state_dict` to load into, made from the saved keys.

    `saved` has the form of each tensor, and None for another value. Tensors that are not zero have
    no value until they are loaded.
    """
    parameters = _parameters(optimizer)
    tree: dict[Any, Any] = {}
    for key, form in saved.items():
        number, *path = (int(part) if part.isdecimal() else part for part in key.split("."))
        if not isinstance(number, int) or number >= len(parameters) or not path:
            continue
        holder = tree.setdefault(number, {})
        for part in path[:-1]:
            holder = holder.setdefault(part, {})
        holder[path[-1]] = (
            None if form is None else _blank(form, parameters[number], is_zero=is_zero)
        )
    return {
        number: {name: _with_lists(value) for name, value in values.items()}
        for number, values in tree.items()
    }


def _blank(form: Form, parameter: torch.Tensor, *, is_zero: bool) -> torch.Tensor:
    """A tensor of this form, sharded as the parameter if it has its shape."""
    dtype, shape = form
    make, make_like = (
        (torch.zeros, torch.zeros_like) if is_zero else (torch.empty, torch.empty_like)
    )
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        if shape in (tuple(parameter.shape), tuple(local.shape)):
            return make_like(parameter.detach(), dtype=dtype)
        parameter = local
    return make(shape, dtype=dtype, device=parameter.device)


def _with_lists(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    inner = {name: _with_lists(inner_values) for name, inner_values in values.items()}
    if inner.keys() == set(range(len(inner))):
        return [inner[number] for number in range(len(inner))]
    return inner


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_state(part: Stateful, saved: dict[str, Any]) -> None:
    """Load the state of an object; that of an optimizer with its types and values.

    Torch gives tensors the type of their parameter, makes the `repr` of a generator of each text,
    and fails at NumPy's arrays.
    """
    if not isinstance(part, Optimizer):
        part.load_state_dict(saved)
        return
    is_torchs = type(part).load_state_dict is Optimizer.load_state_dict
    part.load_state_dict(saved | {"state": _castable(saved["state"])} if is_torchs else saved)
    for number, parameter in enumerate(_parameters(part)):
        values = saved["state"].get(number, {})
        if parameter in part.state:
            part.state[parameter] = _with_values(part.state[parameter], values)
        if is_torchs and _types(values) != _types(part.state.get(parameter, {})):
            part.state[parameter] = values


def _castable(value: Any) -> Any:
    """The value, with None for all that torch cannot cast."""
    if isinstance(value, dict):
        return {name: _castable(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_castable, value))
    return value if isinstance(value, _CAST) or not isinstance(value, Iterable) else None


def _with_values(loaded: Any, saved: Any) -> Any:
    """What was loaded, with the saved values for texts and for None."""
    if loaded is None or (isinstance(loaded, str) and loaded.startswith(_TEXT_OF_TORCH)):
        return saved
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        for name in loaded.keys() & saved.keys():
            loaded[name] = _with_values(loaded[name], saved[name])
    elif isinstance(loaded, (list, tuple)) and type(loaded) is type(saved):
        return type(loaded)(map(_with_values, loaded, saved))
    elif isinstance(loaded, (set, frozenset)) and any(isinstance(text, str) for text in loaded):
        return saved
    return loaded


def _types(values: Mapping[str, Any]) -> list[object]:
    return [getattr(holder[name], "dtype", None) for _, holder, name in leaves(values)]


def leaves(holder: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each value's key, container and name, by torch's rules."""
    entries = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
    for name, value in entries:
        key = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) or (isinstance(value, list) and not _is_whole(value)):
            yield from leaves(value, key)
        else:
            yield key, holder, name


def keys_in(values: Any, path: str) -> list[str]:
    return [key for key, _, _ in leaves(values, path)]


def _is_whole(values: list[Any]) -> bool:
    """Torch keeps a list as one value unless there are tensors or dicts somewhere in it."""
    return not any(
        isinstance(value, (torch.Tensor, Mapping))
        or (isinstance(value, list) and not _is_whole(value))
        for value in values
    )
