"""How much memory there still is, for this process and where it is."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_NEVER = 1 << 62


def available_bytes(descriptor: int | None) -> int:
    """Of memory; and of the file system of this file, if there is one."""
    room = min(_of_machine(), _of_group())
    return room if descriptor is None else min(room, free_bytes(descriptor))


def free_bytes(descriptor: int) -> int:
    """Of the file system of this file, on a disk."""
    about = os.fstatvfs(descriptor)
    return about.f_bavail * about.f_frsize


def _of_machine() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return _NEVER
    return next(
        (int(one.split()[1]) << 10 for one in lines if one.startswith("MemAvailable")), _NEVER
    )


def _of_group() -> int:
    """What a container leaves; its page cache is given back when memory is needed."""
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        details = (_CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return _NEVER
    if most == "max":
        return _NEVER
    cache = sum(int(one.split()[1]) for one in details if one.startswith(("inactive_file ",)))
    return max(0, int(most) - used + cache)
