"""`DcpStager`: copies a state for `dcp.async_save` into memory that is allocated once."""

import ctypes
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.flat_state import is_bare
from trainer_sdk.checkpoint.save.buffers import MOST_BUFFERS, Arena, Buffer
from trainer_sdk.checkpoint.save.plan import PAGE_BYTES, up

_ALIGNED = 64


class DcpStager(AsyncStager):
    """An `AsyncStager`: `dcp.async_save(state, …, async_stager=stager)`; use one for all saves.

    `stage` returns when the state is copied, so the training may change it at once. A copy's memory
    is used again when torch has dropped the copy; while all `in_flight` copies are in use, `stage`
    makes one in fresh memory.
    """

    def __init__(self, *, in_flight: int = 1) -> None:
        super().__init__()
        self._arena = Arena(arguments.whole("in_flight", in_flight, 1, MOST_BUFFERS))

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state on the CPU."""
        size = _bytes_of(state_dict)
        buffer = self._arena.next()
        with torch.inference_mode(mode=False), torch.no_grad():
            memory = _Memory(None if buffer is None else _fitted(buffer, size))
            return {key: memory.copy(value) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has copied everything."""

    def close(self) -> None:
        """Release the memory that is not in use."""
        for buffer in self._arena.spare():
            buffer.close()


def _fitted(buffer: Buffer, size: int) -> Buffer:
    if buffer.size < size:
        buffer.fit(up(size + size // 16 + 1, PAGE_BYTES))
    return buffer


class _Memory:
    """The memory of one copy: a buffer, which is free again when no tensor uses it."""

    def __init__(self, buffer: Buffer | None) -> None:
        self._at = 0
        self._octets: torch.Tensor | None = None
        if buffer is not None:
            buffer.is_free = False
            # Torch holds this object as long as any tensor uses the memory.
            lent = (ctypes.c_char * buffer.size).from_buffer(buffer.mapped)
            weakref.finalize(lent, _free, buffer)
            self._octets = torch.frombuffer(lent, dtype=torch.uint8)

    def copy(self, value: Any) -> Any:
        """A copy of a value of the state."""
        if isinstance(value, DTensor):
            return _like(value, self.copy(value.to_local()))
        if isinstance(value, torch.Tensor):
            return self._copy_of(value.detach())
        if isinstance(value, Mapping):
            return {key: self.copy(inner) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.copy, value))
        return value

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.nbytes
        if self._octets is None or not size or not is_bare(tensor):
            return tensor.cpu().clone()
        begin, self._at = self._at, up(self._at + size, _ALIGNED)
        place = self._octets[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)


def _free(buffer: Buffer) -> None:
    buffer.is_free = True


def _like(sharded: DTensor, local: torch.Tensor) -> DTensor:
    """The same sharding, with a copy of this rank's part."""
    # `from_local` would copy it back to the device of the mesh.
    return DTensor(local, sharded._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001


def _bytes_of(value: Any) -> int:
    if isinstance(value, DTensor):
        return _bytes_of(value.to_local())
    if isinstance(value, torch.Tensor):
        return up(value.nbytes, _ALIGNED)
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    return 0
