"""Opens files that others name or write: regular ones only, as a FIFO would wait for ever."""

import errno
import os
import stat
from io import FileIO


def open_regular(path: "str | os.PathLike[str]") -> FileIO:
    """Open a file to read it, unbuffered; `OSError` at once if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return FileIO(descriptor)


def read_regular(path: "str | os.PathLike[str]") -> bytes:
    """All bytes of a file; `OSError` at once if it is not a regular file."""
    with open_regular(path) as file:
        return file.readall()


def check_regular(descriptor: int, path: "str | os.PathLike[str]") -> None:
    """Raise the `OSError` that tells what an open file is, if it is not a regular file."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device"
        raise OSError(errno.ENXIO, f"it is {kind}, not a regular file", os.fspath(path))
