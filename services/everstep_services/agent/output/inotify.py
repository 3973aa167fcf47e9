"""Linux's inotify, as far as following logs needs it: the kernel reports files that grow."""

import ctypes
import errno
import os
import struct
from pathlib import Path

IN_MODIFY = 0x2
IN_Q_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 256 * 1024


class Inotify:
    """Watches single files. Not thread-safe. Raises OSError if the kernel has no watch left."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise _last_error()

    def watch(self, path: Path) -> int:
        """Watch a file; return the number that `changed` will give."""
        number = self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), IN_MODIFY)
        if number < 0:
            raise _last_error()
        return int(number)

    def unwatch(self, number: int) -> None:
        """Forget a file."""
        self._libc.inotify_rm_watch(self.descriptor, number)

    def changed(self) -> set[int] | None:
        """The files that changed since the last call, without a wait; None: perhaps any."""
        numbers: set[int] = set()
        while True:
            try:
                data = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:
                return numbers
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                if mask & IN_Q_OVERFLOW:
                    return None
                numbers.add(number)
                at += _EVENT.size + length

    def close(self) -> None:
        """Give it back."""
        os.close(self.descriptor)


def _last_error() -> OSError:
    number = ctypes.get_errno() or errno.EIO
    return OSError(number, os.strerror(number))
