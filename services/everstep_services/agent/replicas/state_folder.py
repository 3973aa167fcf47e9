"""The folder of this node's states. In memory, it outlives ranks and killed agents.

On a disk, with `local_root` instead of `memory_dir`, it outlives a reboot.

<memory_dir>/everstep-<uid>/images/<job>@<node>/            one agent's, locked while it lives
<memory_dir>/everstep-<uid>/images/<job>@<node>/left.json   its agent ended, and may come again
<memory_dir>/everstep-<uid>/images/<job>@<node>/disk        marks that it is on a disk
"""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.clock import Clock, SystemClock
from everstep.evidence.files import read_regular
from everstep_services.agent.ranks import process_tree
from everstep_services.agent.replicas.manager import CODED
from everstep_services.agent.replicas.transfer.fetcher import OFFER
from everstep_services.agent.runtime.workdir import private_dir
from trainer_sdk import layout
from trainer_sdk.checkpoint.image_folder import ON_DISK, sync_names
from trainer_sdk.checkpoint.manifest import INDEX

log = logging.getLogger(__name__)

LEFT = "left.json"
_WITHIN_S = 2.0
"""The lock of a killed agent is free once the process is gone, with all of its memory."""
_LOOK_EVERY_S = 0.02
_OURS = 3
"""Folders above an agent's that may be new: images/, everstep-<uid>/, and their parent."""
_LONGEST_S = 366 * 86400.0
"""A note that asks for longer is not ours, or the clock was wrong."""


@dataclass
class LeftoverPolicy:
    """Which states stay when their agent ends, for how long, and in how much space."""

    for_s: float = 0.0
    """How long they stay; 0 for not at all."""
    most_bytes: int | None = None
    """The most space for the states of all jobs on this node whose agents have ended."""
    room_least_bytes: int = 0
    """The space of the file system that stays free."""
    clock: Clock = field(default_factory=SystemClock)
    is_on_disk: bool = False
    """States outlive a reboot: those of a killed agent stay, too, counted from the newest."""
    stays: bool = True
    """False once the job has ended well: then no state outlives it."""


class LeftoverNote(msgspec.Struct, frozen=True):
    """The note of an agent that has ended, and whose job may come again to this node."""

    job: str
    until: float
    """In seconds since 1970: from then on the states may be removed."""


@contextmanager
def opened_images(
    job: str, node: str, memory: Path, departure: LeftoverPolicy | None = None
) -> Iterator[Path | None]:
    """The folder; None where there is no memory for files, or another agent has it. Blocks.

    What an agent of the same job and node has left is taken over. What agents of other jobs have
    left is removed: at once if they were killed; after the time in their note if they ended.
    """
    departure = departure or LeftoverPolicy()
    if not os.access(memory, os.W_OK):
        yield None
        return
    base = private_dir(private_dir(memory / f"everstep-{os.getuid()}") / "images")
    name = f"{job}@{node}"
    folder, lock = base / name, None
    for is_last in _looks():
        with process_tree.alone_in(base):
            _sweep(base, name, departure)
            lock = _locked(private_dir(folder) / layout.LOCK_FILE)
        if lock is not None or is_last:
            break
    if lock is None:
        yield None
        return
    try:
        shutil.rmtree(folder / CODED, ignore_errors=True)
        (folder / OFFER).unlink(missing_ok=True)
        (folder / LEFT).unlink(missing_ok=True)
        _say_what_it_is(folder, departure)
        yield folder
    finally:
        has_left = _has_left(folder, job, departure)
        os.close(lock)
        if has_left:
            with process_tree.alone_in(base):
                _sweep(base, "", departure)


def sweep(folder: Path, departure: LeftoverPolicy) -> None:
    """Remove overdue states of other jobs' agents in the same parent folder. Blocks."""
    with process_tree.alone_in(folder.parent):
        _sweep(folder.parent, folder.name, departure)


def _has_left(folder: Path, job: str, departure: LeftoverPolicy) -> bool:
    """End with this folder: return whether its states stay."""
    base, left = folder.parent, folder / LEFT
    if departure.stays and departure.for_s > 0 and any(folder.rglob(INDEX)):
        shutil.rmtree(folder / CODED, ignore_errors=True)
        until = departure.clock.wall().timestamp() + departure.for_s
        with suppress(OSError):  # without the note, the next agent of another job removes all of it
            left.write_bytes(msgspec.json.encode(LeftoverNote(job, until)))
        log.info("images_left folder=%s for_s=%g", folder, departure.for_s)
        return True
    _empty(folder)
    with process_tree.alone_in(base):
        shutil.rmtree(folder, ignore_errors=True)
    return False


def _sweep(base: Path, name: str, departure: LeftoverPolicy) -> None:
    """Remove folders of dead agents; of those that may come again, only old or large ones."""
    waiting: list[tuple[float, Path]] = []
    now = departure.clock.wall().timestamp()
    for folder in list(base.iterdir()):
        lock = folder / layout.LOCK_FILE
        if folder.name == name or (lock.exists() and not process_tree.is_free(str(lock))):
            continue
        left = _left(folder) or _killed(folder, departure)
        if left is None or not now < left.until <= now + _LONGEST_S:
            _remove(folder)
        else:
            waiting.append((left.until, folder))
    for is_first_to_go in _excess(base, waiting, departure):
        _remove(is_first_to_go)


def _excess(
    base: Path, waiting: list[tuple[float, Path]], departure: LeftoverPolicy
) -> Iterator[Path]:
    """The folders that ended first, until the rest fits and leaves enough space."""
    sizes = {folder: _size_of(folder) for _, folder in waiting}
    for _, folder in sorted(waiting):
        about = os.statvfs(base)
        is_full = about.f_bavail * about.f_frsize < departure.room_least_bytes
        most = departure.most_bytes
        if not is_full and (most is None or sum(sizes.values()) <= most):
            return
        del sizes[folder]
        yield folder


def _left(folder: Path) -> LeftoverNote | None:
    try:
        return msgspec.json.decode(read_regular(folder / LEFT), type=LeftoverNote)
    except (OSError, msgspec.DecodeError):
        return None


def _killed(folder: Path, departure: LeftoverPolicy) -> LeftoverNote | None:
    """A note for a killed agent on a disk, which had no time to write its own."""
    if not departure.is_on_disk:
        return None
    saved_at: list[float] = []
    for index in folder.rglob(INDEX):
        with suppress(OSError):
            saved_at.append(index.stat().st_mtime)
    return LeftoverNote("", max(saved_at) + departure.for_s) if saved_at else None


def _say_what_it_is(folder: Path, departure: LeftoverPolicy) -> None:
    """Mark the folder for the ranks, and sync it so that it is there after a power cut."""
    if departure.is_on_disk:
        (folder / ON_DISK).touch(mode=0o600)
        sync_names(folder, _OURS)
    else:
        (folder / ON_DISK).unlink(missing_ok=True)


def _size_of(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_blocks * 512
    return size


def _remove(folder: Path) -> None:
    _empty(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: Path) -> None:
    """Remove everything but the lock: if we are killed now, the rest belongs to a dead agent."""
    for path in folder.glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != layout.LOCK_FILE:
            path.unlink(missing_ok=True)


def _looks() -> Iterator[bool]:
    """Yield for each look whether it is the last one."""
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
