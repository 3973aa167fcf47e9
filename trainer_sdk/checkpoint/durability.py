"""Images on a local disk: durable before they count. Where they are in memory, it costs nothing.

<images>/disk    the agent's word that this folder is on a disk (`local_root`), not in memory
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from trainer_sdk.checkpoint.storage.folder import sync_folder

ON_DISK = "disk"
_PIECE_BYTES = 64 << 20
_WRITE_AND_WAIT = 7
"""Of sync_file_range: before, write and after."""
_library = ctypes.CDLL(None)


def is_on_disk(images: Path | str) -> bool:
    """These images outlive a reboot."""
    return bool(images) and os.path.exists(os.path.join(images, ON_DISK))


def sync_file(path: Path | str, going: Callable[[], None] = lambda: None) -> None:
    """Make its bytes durable, also those written through a mapping; `going` hears of progress."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for at in range(0, os.fstat(file).st_size, _PIECE_BYTES):
            begin, length = ctypes.c_int64(at), ctypes.c_int64(_PIECE_BYTES)
            # What goes wrong here is said by fsync, which also has the disk empty its cache.
            _library.sync_file_range(file, begin, length, ctypes.c_uint(_WRITE_AND_WAIT))
            going()
        os.fsync(file)
    finally:
        os.close(file)


def sync_names(folder: Path | str, above: int) -> None:
    """Make durable which names are in a folder, and in so many above it."""
    for _ in range(above + 1):
        sync_folder(str(folder))
        folder = os.path.dirname(folder)


def put_durably(path: Path, octets: bytes) -> None:
    """Write a small file in the place of what was there: durable, whole, or not at all."""
    written = path.with_name(f".{path.name}")
    with written.open("wb") as file:
        file.write(octets)
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)
    sync_folder(str(path.parent))
