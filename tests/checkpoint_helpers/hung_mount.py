"""A file system that answers nothing: whoever touches it waits in the kernel."""

import ctypes
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)
_DETACH = 2


@contextmanager
def hung(folder: Path) -> Generator[Callable[[], None]]:
    """Hide a folder behind a FUSE file system without a server; the call shows the folder again."""
    if os.geteuid() or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a file system that hangs needs root and /dev/fuse")
    server, place = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC), os.fsencode(folder)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if _LIBC.mount(b"everstep-hung", place, b"fuse", 6, options):  # neither setuid nor devices
        os.close(server)
        pytest.skip(f"mounting fails: {os.strerror(ctypes.get_errno())}")
    waits = [server]

    def answers() -> None:
        while waits:
            _LIBC.umount2(place, _DETACH)
            os.close(waits.pop())  # whoever waits gets an error

    try:
        yield answers
    finally:
        answers()
