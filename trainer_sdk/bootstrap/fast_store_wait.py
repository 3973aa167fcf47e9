"""Early ranks wait for rank 0's store in steps of milliseconds, not of torch's half second.

torch's client sleeps before it retries a store that does not listen yet. When ranks start within
milliseconds of each other, that sleep is the longest part of a round's start.
"""

import sys
from time import monotonic, sleep

TYPE_CHECKING = False  # as in torch_hooks
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Any

_FIRST_S = 0.002
_MOST_S = 0.02
_MOST_S_A_RANK = 20e-6
"""Limits the connection rate, so that a host can answer a hundred thousand ranks."""
_WITHIN_S = 60.0
"""After that torch waits itself, and its own error names the store."""


def wait_for_store_fast() -> None:
    """Have every rank but rank 0 wait until the store listens before torch connects to it."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is None:
        return  # another release of torch: the start is slower, and nothing else changes

    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: "timedelta", *rest: "Any"
    ) -> "Any":
        if rank != 0:
            wait_for_listener(hostname, port, world_size)
        return create(hostname, port, rank, world_size, timeout, *rest)

    rendezvous._create_c10d_store = create_store  # type: ignore[union-attr]  # noqa: SLF001


def wait_for_listener(
    host: str, port: int, world_size: int, is_over: "Callable[[], bool]" = bool
) -> bool:
    """Wait until the address listens.

    False after a minute, if it is not a valid address, or once the wait `is_over`.
    """
    import socket  # torch has imported it

    pause_s, until = _FIRST_S, monotonic() + _WITHIN_S
    longest_s = max(_MOST_S, world_size * _MOST_S_A_RANK)
    while monotonic() < until and not is_over():
        try:
            socket.create_connection((host, port), timeout=5.0).close()
        except (ConnectionRefusedError, ConnectionResetError):
            sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        except OSError:
            return False  # torch reports this error better
        else:
            return True
    return False
