"""Releases ranks that wait in a collective: process groups are aborted from another thread.

NCCL has an abort of its own. Gloo has none that ends a running collective, so its connections are
shut down: every rank that waits on them raises, in this process and at the other ends.
"""

import os
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer_sdk.sdk_log import warn_once

_WITHIN_S = 30.0
_POLL = "anon_inode:[eventpoll]"
_IS_LISTENING = socket.SO_ACCEPTCONN
_polls: set[int] = set()
"""Our duplicates of gloo's event loops, which know its connections."""
_groups: list[Any] = []
_former_groups: list[Any] = []
"""Groups are kept until their threads have nothing to do: torch's destructor holds the interpreter
lock while it waits for them, and a thread that frees a tensor waits for that lock."""


def watch_groups(noticed: Callable[[Any, Any], None] | None = None) -> None:
    """Note the connections of gloo groups that are made from now on.

    `noticed` is called with each group that torch has made, and its timeout.
    """
    make: Callable[..., Any] = distributed_c10d._new_process_group_helper  # noqa: SLF001
    if getattr(make, "everstep", False):
        return

    @wraps(make)
    def made(*arguments: Any, **named: Any) -> Any:
        before = _event_polls()
        try:
            made_group = make(*arguments, **named)
            _groups.append(made_group)
            if noticed is not None:
                noticed(made_group, named.get("timeout"))
            return made_group
        finally:
            for poll in _event_polls() - before:
                _polls.add(os.dup(poll))

    made.everstep = True  # type: ignore[attr-defined]
    distributed_c10d._new_process_group_helper = made  # noqa: SLF001


def begin_groups(iteration: int) -> None:
    """Have groups of this iteration use other keys in the store than those of former ones."""
    _former_groups[:] = _groups
    _groups.clear()
    world = distributed_c10d._world  # noqa: SLF001
    if iteration and hasattr(world, "group_count"):
        world.group_count = max(world.group_count, iteration * 1_000_000)


def abort_groups(*, is_last: bool) -> None:
    """Abort every group of this process, and destroy them if it is the last use."""
    groups = list(distributed_c10d._world.pg_names)  # noqa: SLF001
    with ThreadPoolExecutor(max(1, len(groups)), "everstep-abort") as pool:
        wait([pool.submit(abort_group, group) for group in groups], _WITHIN_S)
    _close_connections()
    if is_last and dist.is_initialized():
        dist.destroy_process_group()


def abort_group(group: Any, *devices: torch.device) -> None:
    """Abort the backends of a group, for these devices or for all; a failure is a warning."""
    try:
        for device in devices or group._device_types:  # noqa: SLF001
            group._get_backend(device).abort()  # noqa: SLF001
    except Exception as error:  # noqa: BLE001 - other groups must be aborted as well
        warn_once(f"a process group could not be aborted: {type(error).__name__}: {error}")


def _close_connections() -> None:
    for poll in list(_polls):
        for descriptor in _polled(poll):
            _shut_down(descriptor)
        os.close(poll)
    _polls.clear()


def _polled(poll: int) -> list[int]:
    """The descriptors that an event loop waits for; none if it is gone."""
    try:
        with open(f"/proc/self/fdinfo/{poll}", encoding="ascii") as file:
            return [int(line.split()[1]) for line in file if line.startswith("tfd:")]
    except (OSError, ValueError, IndexError):
        return []


def _shut_down(descriptor: int) -> None:
    """Shut a connection down; gloo's own listener and its pipes stay."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, _IS_LISTENING):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed already


def _event_polls() -> set[int]:
    polls = set()
    try:
        for name in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{name}") == _POLL:
                    polls.add(int(name))
            except OSError:
                continue
    except OSError:
        return set()  # not Linux: a gloo collective ends when a peer is gone, or by its timeout
    return polls
