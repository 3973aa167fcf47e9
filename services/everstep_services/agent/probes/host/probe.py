"""Check `host`: memory, clock, disk space, limits, and other needs of every rank."""

import errno
from collections.abc import Callable, Iterator

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import CheckState, Look
from everstep_services.agent.probes.host import clock, disk_space, limits, memory
from everstep_services.agent.probes.host.common import NAME, result

_NOT_HERE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.ENODEV}
)
_PARTS: dict[str, Callable[[Look], Iterator[CheckResult]]] = {
    "memory": memory.available,
    "memory pressure": memory.pressure,
    "memory kills": memory.kills,
    "memory errors": memory.errors,
    "clock": clock.kept,
    "clock jumps": clock.jumps,
    "limits": limits.limits,
    "load": limits.load,
    "zombies": limits.zombies,
    "shared memory": disk_space.shared_memory,
    "folders": disk_space.folders,
}
"""The parts in this order: parts that may hang on a file system come last."""


class HostProbe:
    """One result for each part; a part that cannot be read spoils no other."""

    name = NAME
    about = "memory, clock, space, limits and load of this host"
    beside_training = True

    def examine(self, look: Look) -> Iterator[CheckResult]:
        """The result of each part."""
        for subject, part in _PARTS.items():
            try:
                yield from part(look)
            except OSError as error:
                is_absent = error.errno in _NOT_HERE
                state: CheckState = "unsupported" if is_absent else "unknown"
                yield result(subject, state, f"cannot be read: {error}")
            except (ValueError, KeyError, IndexError, ArithmeticError, TypeError) as error:
                kind = type(error).__name__
                yield result(subject, "unknown", f"has an unknown format: {kind}: {error}")
