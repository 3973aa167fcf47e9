"""Has orphans below this process become its children, not init's."""

import ctypes
import os

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """From now on, whatever is left without a parent below this process is adopted by it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
