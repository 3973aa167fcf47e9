"""How a process that is not our child has ended, as far as the kernel tells others."""

import fcntl
import os
import select
import struct
from pathlib import Path

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO, for the first version of its answer
_INFO = struct.Struct("QQ11Ii")
_EXIT = 1 << 3


def is_over(handle: int) -> bool:
    """The process of this handle has ended."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def ending_of(pid: int, handle: int) -> tuple[int | None, int | None]:
    """Its exit code, or the signal that ended it; neither if that cannot be known.

    Until its parent has reaped it, /proc has it; kernels from 6.15 on keep it for holders of a
    handle.
    """
    status = _kept(handle)
    if status is None:
        status = _shown(pid)
    if status is None:
        status = _kept(handle)  # its parent has just reaped it
    if status is None:
        return None, None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def _kept(handle: int) -> int | None:
    asked = bytearray(_INFO.pack(_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(handle, _GET_INFO, asked)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(asked)
    return status if mask & _EXIT else None


def _shown(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[49]) if fields[0] in {"Z", "X"} else None
    except (OSError, ValueError, IndexError):
        return None
