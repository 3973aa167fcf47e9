"""Where the states of this node are, in memory: it outlives ranks, and an agent that was killed.

<memory_dir>/everstep-<uid>/images/<job>@<node>/    one agent's; its lock says that it lives
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep_services.agent.checkpoints.fetching import OFFER
from everstep_services.agent.checkpoints.keep import CODED
from everstep_services.agent.ranks import tree
from everstep_services.agent.workplace import private_dir
from trainer_sdk import layout

_WITHIN_S = 2.0
"""The lock of an agent that was killed is free when it has gone, with all of its memory."""
_LOOK_EVERY_S = 0.02


@contextmanager
def opened_images(job: str, node: str, memory: Path) -> Iterator[Path | None]:
    """The folder; None where there is no memory for files, or another agent has it. Blocks.

    What an agent of the same job and node has left when it was killed is taken over; what other
    jobs' have left is removed. At the end nothing is left.
    """
    if not os.access(memory, os.W_OK):
        yield None
        return
    base = private_dir(private_dir(memory / f"everstep-{os.getuid()}") / "images")
    name = f"{job}@{node}"
    folder, lock = base / name, None
    for is_last in _looks():
        with tree.alone_in(base):
            _sweep(base, name)
            lock = _locked(private_dir(folder) / layout.LOCK_FILE)
        if lock is not None or is_last:
            break
    if lock is None:
        yield None
        return
    try:
        shutil.rmtree(folder / CODED, ignore_errors=True)
        (folder / OFFER).unlink(missing_ok=True)
        yield folder
    finally:
        _empty(folder)
        with tree.alone_in(base):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(base: Path, name: str) -> None:
    """What agents of other jobs or nodes have left that were killed."""
    for folder in base.iterdir():
        lock = folder / layout.LOCK_FILE
        if folder.name != name and (not lock.exists() or tree.is_free(str(lock))):
            _empty(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: Path) -> None:
    """But for the lock: whatever is left when we are killed here belongs to a dead agent."""
    for one in folder.glob("*"):
        if one.is_dir():
            shutil.rmtree(one, ignore_errors=True)
        elif one.name != layout.LOCK_FILE:
            one.unlink(missing_ok=True)


def _looks() -> Iterator[bool]:
    """Whether it is the last time to look."""
    until = time.monotonic() + _WITHIN_S
    while time.monotonic() < until:
        yield False
        time.sleep(_LOOK_EVERY_S)
    yield True


def _locked(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
