"""Check `host`: memory, clock, room, limits, and what else every rank needs of its host."""

import errno
from collections.abc import Callable, Iterator

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes import (
    host_clock,
    host_limits,
    host_memory,
    host_room,
)
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.host_base import NAME, result

_NOT_HERE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.ENODEV}
)
_PARTS: dict[str, Callable[[Look], Iterator[CheckResult]]] = {
    "memory": host_memory.available,
    "memory pressure": host_memory.pressure,
    "memory kills": host_memory.kills,
    "memory errors": host_memory.errors,
    "clock": host_clock.kept,
    "clock jumps": host_clock.jumps,
    "limits": host_limits.limits,
    "load": host_limits.load,
    "zombies": host_limits.zombies,
    "shared memory": host_room.shared_memory,
    "folders": host_room.folders,
}
"""What is looked at, in this order: what may hang on a file system comes last."""


class HostProbe:
    """One result a part; a part that cannot be read spoils no other."""

    name = NAME
    about = "memory, clock, space, limits and load of this host"
    beside_training = True

    def examine(self, look: Look) -> Iterator[CheckResult]:
        """What this host has of each."""
        for subject, part in _PARTS.items():
            try:
                yield from part(look)
            except OSError as error:
                state = "unsupported" if error.errno in _NOT_HERE else "unknown"
                yield result(subject, state, f"cannot be read: {error}")
            except (ValueError, KeyError, IndexError, ArithmeticError, TypeError) as error:
                kind = type(error).__name__
                yield result(subject, "unknown", f"reads as nothing known: {kind}: {error}")
