"""NVRx's `replication.group_utils`: groups of ranks, and the exchange of states in them."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar, Union, cast

import torch
import torch.distributed as dist

from trainer_sdk.bootstrap.torch_exit import wait_at_exit
from trainer_sdk.nvrx.tensor_state import TensorAwareStateDict

T = TypeVar("T")
_BUCKET_BYTES = 64 << 20
"""The size up to which small tensors travel together."""


@dataclass(frozen=True)
class ExchangePlanEntry:
    """A state that one rank sends to another."""

    sender: int
    receiver: int
    id_: Any


@dataclass
class ExchangePlan:
    """Which rank sends which state, in the order of the transfers; the same on all ranks."""

    group: "GroupWrapper"
    _entries: list[ExchangePlanEntry] = field(default_factory=list)

    def plan(self, sender: int, receiver: int, id_: Any) -> None:
        """Add a transfer."""
        self._entries.append(ExchangePlanEntry(sender, receiver, id_))

    @property
    def entries(self) -> tuple[ExchangePlanEntry, ...]:
        """All transfers."""
        return tuple(self._entries)

    def required_ids(self, rank: int | None = None) -> set[Any]:
        """What this rank, or another, must have to send it or to keep it."""
        sender = self.group.my_global_rank if rank is None else rank
        return {entry.id_ for entry in self._entries if entry.sender == sender}


def batched(iterable: Iterable[T], n: int) -> Iterator[tuple[T, ...]]:
    """The items in tuples of `n`; the last may be shorter."""
    if n < 1:
        raise ValueError(f"n must be at least 1, and is {n}")
    items = iter(iterable)
    while batch := tuple(islice(items, n)):
        yield batch


def parse_group_sequence(
    replication_jump: int, replication_factor: int, world_size: int
) -> list[tuple[int, ...]]:
    """The groups of `replication_factor` ranks, each `replication_jump` after the one before."""
    if replication_jump < 1 or replication_factor < 1:
        raise ValueError(
            f"replication_jump {replication_jump} and replication_factor {replication_factor}: "
            "both must be at least 1; a jump is the number of ranks that fail together"
        )
    if world_size % (replication_jump * replication_factor):
        raise ValueError(
            f"{world_size} ranks cannot be split into groups of {replication_factor} ranks that "
            f"are {replication_jump} apart: give a number of ranks that is a multiple of "
            f"{replication_jump * replication_factor}"
        )
    block = replication_jump * replication_factor
    return [
        tuple(range(first, start + block, replication_jump))
        for start in range(0, world_size, block)
        for first in range(start, start + replication_jump)
    ]


class GroupWrapper:
    """A process group; without one, all ranks. Without `torch.distributed`, this rank alone."""

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self._group = group
        wait_at_exit()

    @staticmethod
    def wrap(group: "ProcessGroupLike") -> "GroupWrapper":
        """The wrapper of a group."""
        if isinstance(group, GroupWrapper):
            return group
        if isinstance(group, dist.ProcessGroup):
            return GroupWrapper(group)
        raise ValueError(f"{group!r} is not a process group")

    @staticmethod
    def from_list_of_groups(list_of_groups: "Sequence[dist.ProcessGroup]") -> "GroupWrapper":
        """The group that has this rank."""
        rank = dist.get_rank()
        own = [group for group in list_of_groups if rank in dist.get_process_group_ranks(group)]
        if len(own) != 1:
            raise ValueError(f"rank {rank} is in {len(own)} of these groups, and must be in one")
        return GroupWrapper(own[0])

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """The group itself."""
        return self._group

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank to reach."""
        return not (dist.is_available() and dist.is_initialized())

    @property
    def backend(self) -> str:
        """The backend of the group."""
        return str(dist.get_backend(self._group))

    @property
    def supported_devices(self) -> list[torch.device]:
        """The kinds of devices whose tensors the group can send."""
        kinds = dist.Backend.backend_capability[self.backend]
        return [torch.device(kind) for kind in kinds]

    def get_device(self, wanted_device: Any = None) -> torch.device:
        """A device whose tensors the group can send: the wanted one, or the CPU where possible."""
        kinds = [device.type for device in self.supported_devices]
        if wanted_device is not None:
            device = torch.device(wanted_device)
            if device.type not in kinds:
                raise ValueError(f"{self.backend} cannot send tensors of {device}")
            return device
        if "cpu" in kinds or self._has_gloo():
            return torch.device("cpu")
        return torch.device(kinds[0], torch.cuda.current_device())

    def get_group_rank(self, global_rank: int | None = None) -> int:
        """The rank in the group of a rank; of this one by default."""
        if self.is_alone:
            return 0
        if global_rank is None:
            return dist.get_rank(self._group)
        return global_rank if self._group is None else dist.get_group_rank(self._group, global_rank)

    @property
    def my_group_rank(self) -> int:
        """The own rank in the group."""
        return self.get_group_rank()

    def get_global_rank(self, group_rank: int | None = None) -> int:
        """The rank of a rank in the group; this one by default."""
        if self.is_alone:
            return 0
        if group_rank is None:
            return dist.get_rank()
        return group_rank if self._group is None else dist.get_global_rank(self._group, group_rank)

    @property
    def my_global_rank(self) -> int:
        """The own rank."""
        return self.get_global_rank()

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the group."""
        if self.is_alone:
            return range(1)
        if self._group is None:
            return range(dist.get_world_size())
        return dist.get_process_group_ranks(self._group)

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<GroupWrapper of {list(self.ranks)}, this is rank {self.my_global_rank}>"

    def all_gather_object(self, my_obj: T) -> list[T]:
        """The object of each rank, in the order of the group."""
        if self.is_alone:
            return [my_obj]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, my_obj, group=self._group)
        return cast("list[T]", gathered)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Any:
        """Send a tensor to all ranks."""
        return dist.broadcast(tensor, src, group=self._group)

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """The highest value over all ranks, for each of these numbers."""
        if self.is_alone:
            return [int(number) for number in numbers]
        values = torch.tensor([int(number) for number in numbers], device=self.get_device())
        dist.all_reduce(values, dist.ReduceOp.MAX, self._group)
        return [int(value) for value in values]

    def all_gather_batch(
        self, my_tensors: Sequence[torch.Tensor], target_device: Any = None
    ) -> list[list[torch.Tensor]]:
        """The tensors of each rank, on `target_device` or where the group has sent them."""
        shapes = self.all_gather_object([_Shape.of(tensor) for tensor in my_tensors])
        gathered = []
        for position, of_rank in enumerate(shapes):
            own = my_tensors if position == self.my_group_rank else None
            send = functools.partial(self.broadcast, src=self.get_global_rank(position))
            gathered.append(self._transfer(of_rank, own, send, target_device))
        return gathered

    def isend_state_dict(self, state_dict: TensorAwareStateDict, dst: int) -> dict[str, float]:
        """Send a state to a rank."""
        tensors = list(state_dict.pop_tensors())
        try:
            shapes = [_Shape.of(tensor) for tensor in tensors]
            self.send_object((state_dict, shapes), dst)
            send = functools.partial(dist.send, dst=dst, group=self._group)
            self._transfer(shapes, tensors, send, None)
        finally:
            state_dict.insert_tensors(tensors)
        return {"data_sent": float(sum(tensor.nbytes for tensor in tensors))}

    def irecv_state_dict(self, src: int) -> tuple[TensorAwareStateDict, dict[str, float]]:
        """Receive a state from a rank."""
        state_dict, shapes = self.recv_object(src)
        receive = functools.partial(dist.recv, src=src, group=self._group)
        tensors = self._transfer(shapes, None, receive, "cpu")
        state_dict.insert_tensors(tensors)
        return state_dict, {"data_recv": float(sum(tensor.nbytes for tensor in tensors))}

    def send_object(self, obj: Any, dst: int) -> None:
        """Send an object to a rank."""
        dist.send_object_list([obj], dst, group=self._group, device=self.get_device())

    def recv_object(self, src: int) -> Any:
        """Receive an object from a rank."""
        received = [None]
        dist.recv_object_list(received, src, group=self._group, device=self.get_device())
        return received[0]

    def execute_plan(
        self, exchange_plan: ExchangePlan, my_data: Mapping[Any, TensorAwareStateDict]
    ) -> dict[Any, TensorAwareStateDict]:
        """Carry out the transfers; returns the states that this rank receives, or keeps."""
        missing = exchange_plan.required_ids() - my_data.keys()
        if missing:
            raise KeyError(f"rank {self.my_global_rank} must send {missing}, and does not have it")
        rank, received = self.my_global_rank, {}
        for entry in exchange_plan.entries:
            if entry.sender == entry.receiver == rank:
                received[entry.id_] = my_data[entry.id_]
            elif entry.sender == rank:
                self.isend_state_dict(my_data[entry.id_], entry.receiver)
            elif entry.receiver == rank:
                received[entry.id_], _ = self.irecv_state_dict(entry.sender)
        return received

    def _has_gloo(self) -> bool:
        return "gloo" in self.backend

    def _transfer(
        self,
        shapes: "Sequence[_Shape]",
        own: Sequence[torch.Tensor] | None,
        move: Any,
        target_device: Any,
    ) -> list[torch.Tensor]:
        """Send these tensors, or receive them if `own` is None, in buckets of bytes."""
        device = self.get_device()
        tensors: list[torch.Tensor] = []
        for bucket in _buckets(shapes):
            first = len(tensors)
            size = sum(shape.size_bytes for shape in bucket)
            octets = torch.empty(size, dtype=torch.uint8, device=device)
            if own is not None:
                _pack(octets, own[first : first + len(bucket)])
            if size:
                move(octets)
            octets = octets if target_device is None else octets.to(target_device)
            tensors += _unpack(octets, bucket)
        return tensors


ProcessGroupLike = Union[GroupWrapper, "dist.ProcessGroup"]


@dataclass(frozen=True)
class _Shape:
    """What must be known of a tensor to receive it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Shape":
        return cls(tensor.dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size())


def _buckets(shapes: Sequence[_Shape]) -> Iterator[list[_Shape]]:
    bucket: list[_Shape] = []
    size = 0
    for shape in shapes:
        if bucket and size + shape.size_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(shape)
        size += shape.size_bytes
    if bucket:
        yield bucket


def _pack(octets: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    at = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            octets[at : at + size].copy_(flat)
        at += size


def _unpack(octets: torch.Tensor, shapes: Sequence[_Shape]) -> list[torch.Tensor]:
    """Tensors of their own memory, so that each can be freed, and is aligned."""
    tensors, at = [], 0
    for shape in shapes:
        tensor = torch.empty(shape.shape, dtype=shape.dtype, device=octets.device)
        if shape.size_bytes:
            flat = tensor.reshape(-1).view(torch.uint8)
            flat.copy_(octets[at : at + shape.size_bytes])
        at += shape.size_bytes
        tensors.append(tensor)
    return tensors
