"""Which process holds a lease, and whether it is known to be dead.

Only a process of the same boot and the same process namespace can know that of another one; for
all others the holder lives until its lease runs out.
"""

import os
from functools import cache
from pathlib import Path

_PROC = Path("/proc")


def own_identity() -> str:
    """What no other process ever is: boot, namespace, process id and start time."""
    return _identity(os.getpid())


@cache
def _identity(pid: int) -> str:
    return f"{_place()}/{pid}/{_started(pid)}"


def is_dead(identity: str) -> bool:
    """Whether that process has ended for certain; False for whatever cannot be known from here."""
    place, _, process = identity.rpartition("/")
    place, _, pid = place.rpartition("/")
    if not place or place != _place() or not pid.isdecimal() or not process.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    started = _started(int(pid))
    return started.isdecimal() and started != process


def _place() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """In ticks since the boot; empty when it cannot be read."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
