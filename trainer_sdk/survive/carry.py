"""Takes the state of a process over into objects that are made anew, without a copy where possible.

Modules of FSDP2, HSDP and tensor parallelism keep the process groups with which they were made, so
they cannot train in another round. `rebuild` has the script make them again once the new default
group exists; then the tensors of this rank become those of the new objects. The process's own
memory is the source of what is otherwise a restore: the result is the same, bit for bit.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _random, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import Optimizer

from trainer_sdk.numerics.unsharded import flat_handles, fsdp_groups
from trainer_sdk.sdk_log import warn_once
from trainer_sdk.survive.state_parts import GROUPED, holds_group, is_data, parts_of

State = dict[str, Any]
_ALONE = 2
"""References to the memory of a tensor that shares it with no other: the tensor's, and the one
through which they are counted."""


class _UnfitError(Exception):
    """Why a state cannot be taken over."""


def needs_rebuild(state: Mapping[str, Any]) -> bool:
    """Whether a state holds process groups, so that it must be made anew for another round."""
    return any(map(holds_group, parts_of(state).values()))


def rebuild(build: Callable[[], State], state: State) -> tuple[State, str]:
    """Make the state again, and take its values over from the old one, which is emptied.

    All ranks of the new default group call `build` at the same time. Also returns why this rank's
    values do not fit what `build` has made, which then has none of them; empty if they do.

    Taken over are parameters, buffers, states of optimizers, what other objects give as their
    `state_dict`, and data. Other objects are as `build` makes them.
    """
    held, unfit = None, ""
    try:
        held = _HeldState(state)
    except _UnfitError as error:
        unfit = str(error)
    state.clear()
    _forget_meshes()
    gc.collect()  # modules are parts of cycles, and `build` needs their memory
    made = build()
    if held is not None:
        try:
            held.give(made)
        except _UnfitError as error:
            unfit = str(error)
    return made, unfit


def _forget_meshes() -> None:
    """Empty torch's caches of meshes, which compare equal to new ones although their groups differ.

    A new process has none either: a tracker of random numbers is begun by all ranks together.
    """
    propagator: Any = DTensor._op_dispatcher.sharding_propagator  # noqa: SLF001 - there is no public way
    for owner, name in (
        (propagator.propagate_op_sharding, "cache_clear"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),  # noqa: SLF001
        (getattr(propagator, "_propagate_tensor_meta_cached", None), "cache_clear"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),
    ):
        getattr(owner, name, bool)()  # not all releases of torch have all of them
    _random._rng_tracker = None  # noqa: SLF001


class _Held(Protocol):
    """The values of a part."""

    def locals(self) -> Iterator[Tensor]: ...

    def check(self, path: str, made: object) -> None: ...

    def give(self, made: Any) -> None: ...


class _HeldState:
    """The values of a state, by the path of its parts."""

    def __init__(self, state: State) -> None:
        parts = parts_of(state)
        self._modules = {
            path: _HeldModule(path, part)
            for path, part in parts.items()
            if isinstance(part, nn.Module)
        }
        self._tensors = {
            path: _HeldTensor.of(part) for path, part in parts.items() if isinstance(part, Tensor)
        }
        named = {id(each) for each in parts.values() if isinstance(each, Tensor)}
        named.update(chain.from_iterable(held.ids for held in self._modules.values()))
        self._optimizers = {
            path: _HeldOptimizer(path, part, named)
            for path, part in parts.items()
            if isinstance(part, Optimizer)
        }
        self._data = {path: part for path, part in parts.items() if is_data(part)}
        self._states = {
            path: held
            for path, part in parts.items()
            if not isinstance(part, (nn.Module, Optimizer, Tensor, *GROUPED)) and not is_data(part)
            if (held := self._state_of(path, part)) is not None
        }

    def _state_of(self, path: str, part: Any) -> Any:
        """The state of another object; None if it has none, or only that of other parts."""
        if not _has_state(part):
            if not callable(part):
                warn_once(f"{path} has no state_dict: it goes on as build() makes it")
            return None
        try:
            state = part.state_dict()
        except Exception as error:
            raise _UnfitError(f"{path} has no state_dict now: {error}") from error
        sharded = [each for each in parts_of(state).values() if isinstance(each, DTensor)]
        held: Iterator[_Held] = chain(self._modules.values(), self._optimizers.values())
        places = {tensor.data_ptr() for each in held for tensor in each.locals()}
        if any(each._local_tensor.data_ptr() not in places for each in sharded):  # noqa: SLF001
            raise _UnfitError(f"{path} has sharded tensors that belong to no module or optimizer")
        return None if sharded else state

    @torch.no_grad()
    def give(self, made: State) -> None:
        """Give the values to another state, or none and an `_UnfitError` if its parts differ."""
        parts = parts_of(made)
        of_parts: dict[str, _Held] = {**self._modules, **self._optimizers, **self._tensors}
        for path, held in of_parts.items():
            if path not in parts:
                raise _UnfitError(f"build() does not make {path} again")
            held.check(path, parts[path])
        for path, held in of_parts.items():
            held.give(parts[path])
        for path, state in self._states.items():
            if _has_state(parts.get(path)):
                parts[path].load_state_dict(state)
        for path, data in self._data.items():
            if "." not in path:
                made.setdefault(path, data)
        self._give_data(made, "")

    def _give_data(self, holder: Any, path: str) -> None:
        entries = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
        for name, value in list(entries):
            inside = f"{path}.{name}" if path else str(name)
            if inside not in self._data:
                if isinstance(value, (Mapping, list, tuple)):
                    self._give_data(value, inside)
            elif not _replace(value, self._data[inside]) and isinstance(
                holder, (MutableMapping, list)
            ):
                holder[name] = self._data[inside]


def _replace(made: Any, held: Any) -> bool:
    """Replace the content of a mapping or list, which other objects may know; whether it is one."""
    if isinstance(made, dict) and isinstance(held, dict):
        made.clear()
        made.update(held)
    elif isinstance(made, list) and isinstance(held, list):
        made[:] = held
    else:
        return False
    return True


def _has_state(part: object) -> bool:
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


class _HeldTensor:
    """The memory of a tensor on this rank, without the tensor that was made of it."""

    def __init__(self, local: Tensor, spec: DTensorSpec | None) -> None:
        self.local = local
        self.spec = spec

    @classmethod
    def of(cls, tensor: Tensor) -> "_HeldTensor":
        if isinstance(tensor, DTensor):
            return cls(tensor._local_tensor.detach(), tensor._spec)  # noqa: SLF001 - `to_local` is a step of autograd
        return cls(tensor.detach(), None)

    def locals(self) -> Iterator[Tensor]:
        """The tensors in memory."""
        yield self.local

    def check(self, path: str, made: object) -> None:
        """`_UnfitError` unless the other tensor is the same part of the same whole."""
        if not isinstance(made, Tensor):
            raise _UnfitError(f"{path} was a tensor, and build() makes a {type(made).__name__}")
        old, new = self.form(), _HeldTensor.of(made).form()
        if old != new:
            raise _UnfitError(f"{path} was {_shown(*old)}, and build() makes it {_shown(*new)}")

    def form(self) -> tuple[torch.dtype, list[int], list[int], tuple[object, ...]]:
        """Type, shape, shape of this rank's part, and which part that is."""
        whole = self.local.shape if self.spec is None else self.spec.shape
        part = () if self.spec is None else part_of(self.spec, self.spec.mesh)
        return self.local.dtype, list(whole), list(self.local.shape), part

    def give(self, made: Tensor, *, may_move: bool = False) -> None:
        """Have the other tensor use this memory; copy where others use that tensor's own."""
        inner = made._local_tensor if isinstance(made, DTensor) else made  # noqa: SLF001 - as above
        may_move = may_move or _is_alone(inner)
        if inner.device != self.local.device or not may_move:
            inner.copy_(self.local)
        elif isinstance(made, DTensor):
            made._local_tensor = self.local  # noqa: SLF001 - as FSDP2 replaces it
        else:
            made.data = self.local

    def again(self, name: str, like: Tensor) -> Tensor:
        """The same values of an optimizer, on the mesh of its parameter."""
        if self.spec is None:
            return self.local
        mesh = like.device_mesh if isinstance(like, DTensor) else None
        if mesh is None or part_of(self.spec, mesh) != part_of(self.spec, self.spec.mesh):
            raise _UnfitError(f"{name} was sharded otherwise than build() shards its parameter")
        meta = self.spec.tensor_meta
        assert meta is not None
        placements = self.spec.placements
        return DTensor.from_local(
            self.local, mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride
        )


def part_of(spec: DTensorSpec, mesh: DeviceMesh) -> tuple[object, ...]:
    """Which part of a tensor this rank has on a mesh: ranks with equal ones have equal values."""
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.ndim != len(spec.placements):
        return (mesh.ndim, None)
    return tuple(
        (str(placement), mesh.size(dimension), coordinate[dimension])
        for dimension, placement in enumerate(spec.placements)
        if not placement.is_replicate() and mesh.size(dimension) > 1
    )


def _shown(dtype: torch.dtype, whole: list[int], local: list[int], part: tuple[object, ...]) -> str:
    sharded = f", with {local} at {part} on this rank" if part else ""
    return f"{dtype} {whole}{sharded}"


def _is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor uses its memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _ALONE  # noqa: SLF001 - there is no public way


class _HeldModule:
    """The parameters and buffers of a module, and what else it says is its state."""

    def __init__(self, path: str, module: nn.Module) -> None:
        if any(True for _ in flat_handles([module])):
            raise _UnfitError(f"{path} is wrapped by FullyShardedDataParallel (FSDP1): use FSDP2")
        for parameter in _sharded(module):
            parameter.to_sharded()  # a broken step leaves the whole parameter in its place
        self.ids = {id(tensor) for _, tensor in _named(module)}
        self._tensors = {name: _HeldTensor.of(tensor) for name, tensor in _named(module)}
        self._extra = {name: inner.get_extra_state() for name, inner in _with_extra_state(module)}

    def locals(self) -> Iterator[Tensor]:
        """The tensors in memory."""
        return (tensor.local for tensor in self._tensors.values())

    def check(self, path: str, made: object) -> None:
        """`_UnfitError` unless the other module has the same tensors."""
        tensors = dict(_named(made)) if isinstance(made, nn.Module) else {}
        if tensors.keys() != self._tensors.keys():
            name = min(tensors.keys() ^ self._tensors.keys())
            raise _UnfitError(f"build() makes another {path}: only the old or the new has {name}")
        for name, held in self._tensors.items():
            held.check(f"{path}.{name}", tensors[name])

    def give(self, made: nn.Module) -> None:
        """Give each value to the other module, and forget it."""
        sharded = {id(parameter.sharded_param): parameter for parameter in _sharded(made)}
        for name, tensor in _named(made):
            parameter = sharded.get(id(tensor))
            self._tensors.pop(name).give(tensor, may_move=parameter is not None)
            if parameter is not None:
                parameter.reset_sharded_param()  # FSDP2 keeps a view of the memory
        for name, inner in _with_extra_state(made):
            if name in self._extra:
                inner.set_extra_state(self._extra.pop(name))


def _sharded(module: nn.Module) -> Iterator[Any]:
    """What FSDP2 knows of each of its parameters."""
    return chain.from_iterable(group.fsdp_params for group in fsdp_groups([module]))


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield name, inner


class _HeldOptimizer:
    """The options and states of an optimizer, by the places of its parameters."""

    def __init__(self, path: str, optimizer: Optimizer, named: Collection[int]) -> None:
        groups: list[dict[str, Any]] = optimizer.param_groups
        state: Mapping[Any, Any] = optimizer.state
        self._options = [
            {name: value for name, value in group.items() if name != "params"} for group in groups
        ]
        self._states = [
            [_held_values(path, state.get(each, {}), each) for each in group["params"]]
            for group in groups
        ]
        self._unnamed = [
            [None if id(each) in named else _HeldTensor.of(each) for each in group["params"]]
            for group in groups
        ]
        """Parameters that no module of the state has."""
        self._others = {key: value for key, value in state.items() if not isinstance(key, Tensor)}

    def locals(self) -> Iterator[Tensor]:
        """The tensors in memory."""
        values = (value for states in self._states for state in states for value in state.values())
        return (value.local for value in values if isinstance(value, _HeldTensor))

    def check(self, path: str, made: object) -> None:
        """`_UnfitError` unless the other optimizer has the same parameters."""
        groups = made.param_groups if isinstance(made, Optimizer) else []
        old, new = list(map(len, self._states)), [len(group["params"]) for group in groups]
        if old != new:
            raise _UnfitError(f"{path} had groups of {old} parameters, and build() makes {new}")
        for parameter, state, unnamed in self._with(groups):
            _values_again(path, state, parameter)
            if unnamed is not None:
                unnamed.check(f"a parameter of {path}", parameter)

    def _with(
        self, groups: list[dict[str, Any]]
    ) -> Iterator[tuple[Tensor, dict[Any, Any], _HeldTensor | None]]:
        """The parameters of another optimizer, with what is held for them."""
        parameters = chain.from_iterable(group["params"] for group in groups)
        states, unnamed = chain.from_iterable(self._states), chain.from_iterable(self._unnamed)
        return zip(parameters, states, unnamed, strict=True)

    def give(self, made: Optimizer) -> None:
        """Give all values to the other optimizer."""
        made.state.clear()
        made.state.update(self._others)
        for options, group in zip(self._options, made.param_groups, strict=True):
            group.update(options)
        for parameter, state, unnamed in self._with(made.param_groups):
            if unnamed is not None:
                unnamed.give(parameter)
            if state:
                made.state[parameter] = _values_again("", state, parameter)


def _held_values(path: str, state: Mapping[Any, Any], parameter: Tensor) -> dict[Any, Any]:
    held: dict[Any, Any] = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            if not isinstance(parameter, DTensor) or value.device_mesh != parameter.device_mesh:
                raise _UnfitError(f"{path} has {name} on another mesh than its parameter")
        elif any(map(holds_group, parts_of(value).values())):
            raise _UnfitError(f"{path} has a process group in {name}, which cannot be taken over")
        held[name] = _HeldTensor.of(value) if isinstance(value, Tensor) else value
    return held


def _values_again(path: str, state: Mapping[Any, Any], parameter: Tensor) -> dict[Any, Any]:
    return {
        name: value.again(f"{path}.{name}", parameter) if isinstance(value, _HeldTensor) else value
        for name, value in state.items()
    }
