"""The ranks of a job exchange values as JSON through a process group, never as pickles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
import torch.distributed as dist

from trainer_sdk.bootstrap.torch_exit import wait_at_exit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

Value = TypeVar("Value")
_HEAD = 8
"""The bytes of a length."""
_SHORT = 1024
"""Values up to this length are gathered together with their lengths."""


class RankGroup:
    """The ranks that agree. All of them make each call together, in the same order."""

    def __init__(self, group: "ProcessGroup | None") -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def gather(self, own: Value, of: type[Value]) -> list[Value]:
        """The value of every rank, in the order of ranks."""
        if self._group is None:
            return [own]
        octets = msgspec.json.encode(own)
        gathered = self._all(_padded(octets, _SHORT))
        longest = max(map(_length, gathered))
        if longest > _SHORT:  # rarely: each gathering waits for all ranks
            gathered = self._all(_padded(octets, longest))
        return [
            msgspec.json.decode(each[_HEAD:][: _length(each)].numpy().tobytes(), type=of)
            for each in gathered
        ]

    def follow(self, own: Value, of: type[Value]) -> Value:
        """The value of rank 0, on all ranks."""
        if self._group is None:
            return own
        octets = bytearray(msgspec.json.encode(own))
        length = self._first(torch.tensor([len(octets)], device="cpu"))
        received = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            received = torch.frombuffer(octets, dtype=torch.uint8)
        return msgspec.json.decode(self._first(received).numpy().tobytes(), type=of)

    def highest(self, own: Sequence[int]) -> list[int]:
        """The highest value over all ranks, for each of these numbers."""
        if self._group is None:
            return list(own)
        numbers = torch.tensor(own, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group)
        return [int(number) for number in numbers]

    def begin_gather(self, own: torch.Tensor) -> "tuple[list[torch.Tensor], Work]":
        """The tensors of all ranks, which are complete after the work."""
        assert self._group is not None
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        return gathered, self._group.allgather([gathered], [own])

    def send(self, value: Value, to: int) -> None:
        """Send a value to a rank, which receives it."""
        octets = msgspec.json.encode(value)
        self.send_tensor(torch.tensor([len(octets)], device="cpu"), to).wait()
        self.send_tensor(torch.frombuffer(bytearray(octets), dtype=torch.uint8), to).wait()

    def receive(self, of: type[Value], sender: int) -> Value:
        """The value that a rank sends to this one."""
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.receive_tensor(length, sender)
        octets = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        self.receive_tensor(octets, sender)
        return msgspec.json.decode(octets.numpy().tobytes(), type=of)

    def send_tensor(self, tensor: torch.Tensor, to: int) -> "Work":
        """Begin to send a tensor on the CPU, which must stay as it is until the end of the work."""
        assert self._group is not None
        return self._group.send([tensor], to, 0)

    def receive_tensor(self, tensor: torch.Tensor, sender: int) -> None:
        """Receive into a tensor on the CPU."""
        assert self._group is not None
        self._group.recv([tensor], sender, 0).wait()

    def _all(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        gathered, work = self.begin_gather(own)
        work.wait()
        return gathered

    def _first(self, own: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        self._group.broadcast(own, 0).wait()
        return own


def _padded(octets: bytes, size: int) -> torch.Tensor:
    """The length, and the octets if there is room for them."""
    padded = torch.zeros(_HEAD + size, dtype=torch.uint8, device="cpu")
    content = len(octets).to_bytes(_HEAD, "little") + (octets if len(octets) <= size else b"")
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return padded


def _length(padded: torch.Tensor) -> int:
    return int.from_bytes(padded[:_HEAD].numpy().tobytes(), "little")


class NoGroupError(RuntimeError):
    """Other ranks were launched with this one, and there is no process group to reach them."""

    def __init__(self, world_size: str) -> None:
        super().__init__(
            f"WORLD_SIZE is {world_size}, and this rank has no process group to agree with the "
            "others: call torch.distributed.init_process_group before Checkpointer(…); where each "
            "rank trains by itself, give it WORLD_SIZE=1 and a root of its own"
        )


def group_of_all(world_size: str = "") -> RankGroup:
    """The group of all ranks; of this rank alone, where there is no process group.

    `world_size` is WORLD_SIZE as the launcher has set it. Where collectives need a device, this
    makes a gloo group of its own: all ranks call it together.
    """
    has_group = dist.is_available() and dist.is_initialized()
    if not has_group and world_size.isdecimal() and int(world_size) > 1:
        raise NoGroupError(world_size)
    if has_group:  # without our bootstrap, nobody has asked for it yet
        wait_at_exit()
    if not has_group or dist.get_world_size() == 1:
        return RankGroup(None)
    whole = dist.group.WORLD
    if "gloo" not in dist.get_backend(whole):
        whole = dist.new_group(backend="gloo")
    return RankGroup(whole)
