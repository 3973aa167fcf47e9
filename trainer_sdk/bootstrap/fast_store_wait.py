"""Ranks that are early wait for rank 0's store a few milliseconds, not torch's half second.

torch's client sleeps before it asks a store again that did not listen yet. When ranks start within
milliseconds of each other, that sleep is the longest part of a round's start.
"""

import sys
from time import monotonic, sleep

TYPE_CHECKING = False  # as in torch_hooks
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any

_FIRST_S = 0.002
_MOST_S = 0.02
_MOST_S_A_RANK = 20e-6
"""So that a hundred thousand ranks do not knock more often than their host can answer."""
_WITHIN_S = 60.0
"""Then torch waits in its own way, and says in its own words for whom."""


def meet_promptly() -> None:
    """Before a rank asks for the store of its round, have it listen."""
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is None:
        return  # a torch that has moved it: nothing is lost but the time

    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: "timedelta", *rest: "Any"
    ) -> "Any":
        if rank != 0:
            wait_for_listener(hostname, port, world_size)
        return create(hostname, port, rank, world_size, timeout, *rest)

    rendezvous._create_c10d_store = create_store  # type: ignore[union-attr]  # noqa: SLF001


def wait_for_listener(host: str, port: int, world_size: int) -> bool:
    """Return when somebody listens there; False when nobody did for long, or it is no address."""
    import socket  # only where torch is, which needs it, too

    pause_s, until = _FIRST_S, monotonic() + _WITHIN_S
    longest_s = max(_MOST_S, world_size * _MOST_S_A_RANK)
    while monotonic() < until:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
        except (ConnectionRefusedError, ConnectionResetError):
            sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        except OSError:
            return False  # torch knows better what to say about it
        else:
            return True
    return False
