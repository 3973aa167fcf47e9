"""The default process group of a round: all ranks arrive at the store first, or the round ends."""

from collections.abc import Callable, Mapping, MutableMapping
from time import sleep

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer_sdk.bootstrap.fast_store_wait import wait_for_listener
from trainer_sdk.survive.boundary import RoundOver
from trainer_sdk.survive.group_abort import begin_groups, watch_groups

_ARRIVED, _ALL = "everstep/arrived", "everstep/all"
_LOOK_S = 0.002
_LOOK_S_A_RANK = 100e-6
"""Limits how much many ranks ask of the store."""
_BROKEN = ("gloo", "nccl", "connection", "timed out", "timeout", "store")
"""Words in the errors of torch's groups, which are plain `RuntimeError`s where gloo raises."""


def form_group(
    environ: MutableMapping[str, str], backend: str | None, is_over: Callable[[], bool] | None
) -> bool:
    """Make the default group of these variables; False if there is one, or this rank is alone.

    `RoundOver` once the round `is_over`; without it nothing can end the wait for other ranks.
    """
    if dist.is_initialized() or "RANK" not in environ:
        return False
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if is_over is None:
        dist.init_process_group(backend)
        return True
    # Torch would end the process where NCCL notices that another rank is gone.
    environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    watch_groups()
    begin_groups(0)
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    store = _store(environ, rank, world_size, is_over)
    _arrive(store, world_size, is_over)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return True


def leave_group() -> None:
    """Destroy the groups of the round; raises if their abort has broken the accelerator."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def is_broken_group(error: BaseException) -> bool:
    """Whether another rank or the connection to it may be the cause of this error."""
    if isinstance(error, (dist.DistError, ConnectionError, TimeoutError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _BROKEN)


def _store(
    environ: Mapping[str, str], rank: int, world_size: int, is_over: Callable[[], bool]
) -> TCPStore:
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    if rank:
        wait_for_listener(host, port, world_size, is_over)
    if is_over():
        raise RoundOver
    return TCPStore(host, port, world_size, is_master=rank == 0, wait_for_workers=False)


def _arrive(store: TCPStore, world_size: int, is_over: Callable[[], bool]) -> None:
    """Wait until all ranks have come: then a group forms at once, and nothing can be waited for."""
    if store.add(_ARRIVED, 1) == world_size:
        store.set(_ALL, "1")
    while not store.check([_ALL]):
        if is_over():
            raise RoundOver
        sleep(max(_LOOK_S, world_size * _LOOK_S_A_RANK))
