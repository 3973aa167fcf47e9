"""One file or object, in the place of what was there, whole or not at all."""

import mmap
import os
from contextlib import suppress

from trainer_sdk.checkpoint.storage import lasting, storage_for
from trainer_sdk.checkpoint.storage.folder import sync_folder
from trainer_sdk.checkpoint.writer.disk import CHUNK_BYTES, Going, write_hashed
from trainer_sdk.checkpoint.writer.passage import Passage


def write_file(path: str, octets: memoryview, size: int, going: Going) -> None:
    """Write so many of these bytes; `octets` goes on to the end of the last page."""
    folder, _, name = path.rpartition("/")
    if "://" in path:
        parts = (octets[at : min(at + CHUNK_BYTES, size)] for at in range(0, size, CHUNK_BYTES))
        storage_for(lasting(folder)).put(name, parts)
        return
    beside = f"{folder}/.{name}.{os.getpid()}"
    try:
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        write_hashed(beside, whole, (octets[:whole],), None, Passage(whole), going)
        _cut(beside, size)
        os.replace(beside, path)
        sync_folder(folder or "/")
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _cut(path: str, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
