"""The parts of a training's state: modules, optimizers, other objects and data, by their path."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

GROUPED = (DTensor, DeviceMesh, dist.ProcessGroup)
"""What belongs to process groups."""
_VALUES = (str, bytes, bytearray, int, float, complex, type(None))
_TRAINED = (nn.Module, Optimizer)


def parts_of(state: object) -> dict[str, Any]:
    """Each part once, by its path through mappings, lists and objects that contain other parts.

    Mappings and lists of nothing but data are a part.
    """
    parts: dict[str, Any] = {}
    seen: set[int] = set()

    def add(path: str, value: object) -> None:
        if is_data(value):
            parts[path] = value
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if not isinstance(value, (Mapping, list, tuple)):
            parts[path] = value
        for name, inner in _inside(value):
            add(f"{path}.{name}" if path else name, inner)

    add("", state)
    return parts


def is_data(value: object) -> bool:
    """Whether it is a number, a text, a NumPy array, or a container of these and plain tensors."""
    if isinstance(value, (Mapping, list, tuple)):
        inner: Iterable[object] = value.values() if isinstance(value, Mapping) else value
        return all(is_data(each) or type(each) is Tensor for each in inner)
    return isinstance(value, _VALUES) or type(value).__module__ == "numpy"


def _inside(value: object) -> Iterator[tuple[str, object]]:
    """What a part contains; of an object its optimizers and modules, as a scheduler has some."""
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), inner) for index, inner in enumerate(value))
    elif not isinstance(value, nn.Module):
        attributes = _attributes(value).items()
        yield from ((name, inner) for name, inner in attributes if _trains(inner))


def _trains(value: object) -> bool:
    """Whether it is a module or an optimizer, or a list or mapping of them."""
    values = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple)) and len(value):
        return all(isinstance(each, _TRAINED) for each in values)  # type: ignore[attr-defined]
    return isinstance(value, _TRAINED)


def holds_group(part: object) -> bool:
    """Whether a part has a process group, a mesh, or a tensor that is distributed over one."""
    if isinstance(part, nn.Module):
        return any(map(_module_holds_group, part.modules()))
    values: list[object] = [part, *_attributes(part).values()]
    if isinstance(part, Optimizer):
        states = (state for state in part.state.values() if isinstance(state, Mapping))
        values += [value for state in states for value in state.values()]
        values += [each for group in part.param_groups for each in group["params"]]
    return any(isinstance(value, GROUPED) for value in values)


def _module_holds_group(module: nn.Module) -> bool:
    own = (module._parameters, module._buffers, _attributes(module))  # noqa: SLF001 - there is no public access without those of children
    return hasattr(module, "_get_fsdp_state") or any(
        isinstance(value, GROUPED) for values in own for value in values.values()
    )


def _attributes(value: object) -> dict[str, Any]:
    return getattr(value, "__dict__", {})
