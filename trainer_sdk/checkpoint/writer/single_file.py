"""One file or object, in the place of what was there, whole or not at all."""

import fcntl
import mmap
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress

from trainer_sdk.checkpoint.storage import lasting, storage_for
from trainer_sdk.checkpoint.storage.folder import sync_folder
from trainer_sdk.checkpoint.writer.disk import CHUNK_BYTES, Going, write_hashed
from trainer_sdk.checkpoint.writer.passage import Passage

_SAVING = ".everstep-saving"
_MOST_OF_NAME = 50
"""Characters of at most four bytes each: with what is added, it is a name, however long it was."""
_LEFT_S = 3600.0
"""Nobody has written to it for so long: where locks do not reach other nodes, it tells as much."""
_cleared: set[str] = set()


def write_file(path: str, octets: memoryview, size: int, going: Going) -> None:
    """Write so many of these bytes; `octets` goes on to the end of the last page."""
    folder, _, name = path.rpartition("/")
    if "://" in path:
        parts = (octets[at : min(at + CHUNK_BYTES, size)] for at in range(0, size, CHUNK_BYTES))
        storage_for(lasting(folder)).put(name, parts)
        return
    with _held(f"{folder}/.{name[:_MOST_OF_NAME]}.{os.getpid()}{_SAVING}") as beside:
        _clear(folder or "/", os.stat(beside).st_mtime)
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        write_hashed(beside, whole, (octets[:whole],), None, Passage(whole), going)
        _cut(beside, size)
        _liken(beside, path)
        os.replace(beside, path)
        sync_folder(folder or "/")


@contextmanager
def _held(path: str) -> Generator[str]:
    """A file that is made, of which everybody can see by its lock that its writer lives."""
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks, where nothing is cleared away
            fcntl.flock(held, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held), os.stat(path)):
                break
        os.close(held)  # somebody has just cleared it away
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(held)


def _clear(folder: str, now: float) -> None:
    """Remove what writers have left that were killed; once is enough. `now` is the storage's."""
    if folder in _cleared:
        return
    _cleared.add(folder)
    with os.scandir(folder) as entries:
        names = [one.name for one in entries if one.name.endswith(_SAVING)]
    for path in (os.path.join(folder, one) for one in names if one.startswith(".")):
        with suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if now - os.fstat(file.fileno()).st_mtime > _LEFT_S:
                os.unlink(path)


def _liken(new: str, old: str) -> None:
    """Who may read the file that is there may read the new one, and nobody else."""
    with suppress(FileNotFoundError):
        about = os.stat(old)
        with suppress(PermissionError):
            os.chown(new, about.st_uid, about.st_gid)
        os.chmod(new, stat.S_IMODE(about.st_mode))


def _cut(path: str, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
