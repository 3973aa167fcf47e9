"""What wrappers of modules know: FSDP's whole parameters, and the ranks with other data."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def with_wrappers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules, and DDP's wrappers of any of them: a state often has only what is wrapped."""
    inner = set(map(id, _wrapped(modules)))
    if not inner or not dist.is_available() or not dist.is_initialized():
        return list(modules)
    wrappers = [
        part
        for part in gc.get_objects()  # a wrapper leaves no trace in its module
        if issubclass(type(part), nn.parallel.DistributedDataParallel)
        and hasattr(part, "reducer")  # its constructor has not failed
        and id(part) not in inner
        and not inner.isdisjoint(map(id, part.modules()))
    ]
    return [*modules, *wrappers]


def unsharded_parameters(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """FSDP's whole parameters, by the id of the shard: backward leaves a rank's gradients there.

    Those of FSDP1 are parts of a single one. Those of FSDP2 are there from the first step on.
    """
    modules = list(modules)
    whole: dict[int, Tensor] = {}
    for group in fsdp_groups(modules):
        for parameter in getattr(group, "fsdp_params", ()):
            tensor = getattr(parameter, "_unsharded_param", None)
            shard = getattr(parameter, "sharded_param", None)
            if isinstance(tensor, Tensor) and shard is not None:
                whole[id(shard)] = tensor
    for handle in flat_handles(modules):
        for shard in getattr(handle.flat_param, "_params", None) or ():
            whole[id(shard)] = handle.flat_param
    return whole


def data_parallel_ranks(modules: Iterable[nn.Module], replicas: Any = None) -> tuple[int, ...]:
    """The ranks with the same part of the model and other data; empty if that is not known."""
    if replicas is not None:
        return tuple(dist.get_process_group_ranks(replicas))
    modules = list(modules)
    for module in _wrapped(modules):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return tuple(dist.get_process_group_ranks(module.process_group))
    for group in fsdp_groups(modules):
        mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
        if mesh is not None:
            return tuple(mesh.mesh.flatten().tolist())
    for handle in flat_handles(modules):
        return tuple(dist.get_process_group_ranks(handle.process_group))
    return ()


def flat_handles(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What FSDP1 knows of the parameters of a module that it wraps."""
    for module in _wrapped(modules):
        handle = getattr(module, "_handle", None)
        if isinstance(getattr(handle, "flat_param", None), Tensor):
            yield handle


def fsdp_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in _wrapped(modules):
        state_of = getattr(module, "_get_fsdp_state", None)
        if state_of is None:
            continue
        state = state_of()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12 has a single group
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def _wrapped(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from module.modules()
