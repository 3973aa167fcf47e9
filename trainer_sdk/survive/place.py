"""Which part of a training's state a rank has, as a name: equal names have equal bytes."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from everstep.hashing import hash_of
from trainer_sdk.numerics.replica_hash import local_part
from trainer_sdk.numerics.snapshot import TrainingParts

_OF_EACH_RANK = frozenset({"FullyShardedDataParallel", "ZeroRedundancyOptimizer"})
"""Classes that divide the state among ranks, and do not show how."""
_DIGITS = 16


def place_of(state: Mapping[str, Any], name: str = "") -> str:
    """The place of this rank: by the form of the state, and the part of each distributed tensor.

    Ranks whose state has one form, as those of DDP, have the same place. Where it is unknown
    whether other ranks have the same part, the place is this rank's alone: images are restored
    rather than a wrong replica copied. Stages of a pipeline that look alike must give a `name`,
    which stands for all but values that each rank has for itself, as `PerRank` has them.
    """
    own = f"rank {dist.get_rank()}" if dist.is_initialized() else "rank 0"
    if any(getattr(part, "of_one_world", False) for part in state.values()):
        return f"{name} {own}".lstrip()
    if name:
        return name
    parts = TrainingParts(state)
    modules = [module for root in parts.modules for module in root.modules()]
    if any(map(_is_of_each_rank, (*modules, *parts.optimizers, *parts.parameters()))):
        return own
    tensors = parts.named | _buffers(parts.modules)
    forms = [
        (name, str(tensor.dtype), tuple(local_part(tensor).shape), list(_part_of(tensor)))
        for name, tensor in sorted(tensors.items())
    ]
    return hash_of(msgspec.json.encode(forms))[:_DIGITS]


def _buffers(modules: list[nn.Module]) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": buffer
        for number, module in enumerate(modules)
        for name, buffer in module.named_buffers()
    }


def _is_of_each_rank(part: object) -> bool:
    if isinstance(part, Tensor):  # Megatron marks what it divides, and keeps plain tensors
        return bool(getattr(part, "tensor_model_parallel", False))
    return any(kind.__name__ in _OF_EACH_RANK for kind in type(part).__mro__)


def _part_of(tensor: Tensor) -> Iterator[tuple[Any, ...]]:
    """What distinguishes this rank's part of a distributed tensor from those of other ranks."""
    if not isinstance(tensor, DTensor):
        return
    mesh = tensor.device_mesh
    own = mesh.get_coordinate() or [-1] * mesh.ndim
    for dimension, (placement, at) in enumerate(zip(tensor.placements, own, strict=True)):
        if not placement.is_replicate():
            yield dimension, str(placement), at
    yield from _beyond(mesh)


def _beyond(mesh: DeviceMesh) -> Iterator[tuple[Any, ...]]:
    """The position in dimensions that the tensor's mesh lacks: there may be other stages."""
    root = _root_of(mesh)
    within = set(mesh.mesh.flatten().tolist())
    own = list(root.get_coordinate() or [-1] * root.ndim)
    for dimension, at in enumerate(own):
        line: list[Any] = [*own[:dimension], slice(None), *own[dimension + 1 :]]
        if not within.issuperset(root.mesh[tuple(line)].tolist()):
            yield "root", dimension, at
    if dist.is_initialized() and root.size() < dist.get_world_size():
        yield "ranks", min(root.mesh.flatten().tolist())


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one is a slice of; torch has no public name for it."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()  # noqa: SLF001 - as above
    root: DeviceMesh = device_mesh._mesh_resources.get_root_mesh(mesh)  # noqa: SLF001 - as above
    return root
