"""The folder in which ranks of another launcher and their agent meet: its lock, its removal.

Imports little: it must be removed also where the rest of the agent cannot be imported.
"""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from everstep.errors import EverstepError
from trainer_sdk import layout
from trainer_sdk.attachment import AGENT_LOCK, SOCKET
from trainer_sdk.bootstrap.agent_link import ShortPath


@contextmanager
def bound_socket(folder: Path) -> Iterator[socket.socket]:
    """The socket for rare messages of ranks."""
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as door:
        with ShortPath(str(path)) as short:
            door.bind(short)
        path.chmod(0o600)
        try:
            yield door
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def sole_agent(folder: Path, lock: int) -> Iterator[None]:
    """Be the only agent that watches the ranks of this folder, by the lock that was passed to us.

    The folder is removed at the end: at once if we cannot watch, otherwise when no rank is left.
    After an unforeseen error it stays, with the log, until the next agent of this user looks.
    """
    here = os.open(folder / layout.LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_left = False
    try:
        fcntl.flock(here, fcntl.LOCK_SH)  # while we look into it, nobody else removes it
        try:
            yield
            is_left = _locked(here)
        except (EverstepError, ModuleNotFoundError):
            is_left = True
            raise
        finally:
            if is_left and _is_same(lock, folder / AGENT_LOCK):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(here)


def _locked(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
