"""Single files in the background: what `torch.save` writes, without the wait for the disk."""

import os
import threading
import time
from collections.abc import Callable
from typing import IO, Any, cast

import torch

from trainer_sdk.checkpoint import leaving
from trainer_sdk.checkpoint.arena import Arena, Buffer
from trainer_sdk.checkpoint.save import OnError, Patience, SaveError
from trainer_sdk.checkpoint.saves import SaveQueue
from trainer_sdk.checkpoint.telling import Teller
from trainer_sdk.checkpoint.template import SparseFile
from trainer_sdk.checkpoint.writer.orders import WriteFile

_PAGE = 4096
_LOOK_EVERY_S = 0.005


class FileSaves:
    """A queue of files. What is written is what the object was when it was scheduled."""

    def __init__(
        self, on_error: OnError = "warn", *, in_flight: int = 1, patience: Patience | None = None
    ) -> None:
        rank = os.environ.get("RANK", "0")  # noqa: TID251 - a script has no settings file of ours
        self._patience = patience or Patience()
        self._queue = SaveQueue(int(rank), Teller(int(rank), None), on_error, self._patience)
        self._arena = Arena(in_flight)
        self._pid = os.getpid()
        leaving.remember(self)

    @property
    def unfinished(self) -> int:
        """How many were scheduled and are not finalized."""
        return self._queue.unfinished

    def schedule(
        self,
        obj: object,
        path: "str | os.PathLike[str]",
        finalize: tuple[Callable[[], None], ...] = (),
    ) -> int:
        """Take the object as it is now, and write it later; the number of this save.

        It waits while earlier ones have all the memory. `finalize` is called by `maybe_finalize`
        once the file is durable.
        """
        called_at = time.monotonic()
        size = _size_of(obj)
        buffer = self._free_buffer()
        if buffer.size < size:
            buffer.fit(-(-(size + size // 8) // _PAGE) * _PAGE)
        save = self._queue.begin(None, buffer, finalize, called_at)
        _fill(buffer, obj)
        save.stall_s = time.monotonic() - called_at
        where = os.fspath(path)
        where = where if "://" in where else os.path.abspath(where)
        order = WriteFile(save=save.number, image=buffer.path, size_bytes=size, path=where)
        self._queue.delivery.send(save, order)
        return save.number

    def maybe_finalize(self, blocking: bool = False, within_s: float | None = None) -> list[int]:
        """Call what was to be called after the files that are durable; their numbers."""
        return self._queue.maybe_finalize(blocking, within_s)

    def await_all(self) -> SaveError | None:
        """Wait for what was scheduled, with a bound; the failure that the script must end with."""
        return self._queue.await_all()

    def close(self, abort: bool = False) -> None:
        """Wait for the last file, with a bound, or abandon it; then leave nothing behind."""
        failure = self._close(abort)
        if failure is not None:
            raise failure

    def leave(self, *, is_failing: bool) -> SaveError | None:  # noqa: ARG002 - files have no images
        """The same, where nobody could catch what is raised."""
        return self._close(abort=False)

    def _close(self, abort: bool) -> SaveError | None:
        if os.getpid() != self._pid:
            return None
        leaving.forget(self)
        failure = self._queue.close(abort)
        self._arena.close(keeps_images=False)
        return failure

    def _free_buffer(self) -> Buffer:
        deadline = time.monotonic() + self._patience.write_within_s
        while (buffer := self._arena.next()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no file could be written for {self._patience.write_within_s:g} s"
                )
            time.sleep(_LOOK_EVERY_S)
        return buffer


class _Into:
    """Writes to a buffer, as to a file."""

    def __init__(self, buffer: Buffer) -> None:
        self._mapped = buffer.mapped
        self._at = 0

    def write(self, octets: memoryview) -> int:
        self._mapped[self._at : self._at + len(octets)] = octets
        self._at += len(octets)
        return len(octets)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """Nothing is held back."""


_own: FileSaves | None = None
_opening = threading.Lock()


def async_save(obj: object, path: "str | os.PathLike[str]") -> int:
    """Like `torch.save`, but the file is written in the background; `torch.load` reads it.

    The file appears whole or not at all. The end of the interpreter waits for it.
    """
    global _own  # noqa: PLW0603 - a process has one
    with _opening:
        if _own is None:
            _own = FileSaves()
    _own.maybe_finalize()
    return _own.schedule(obj, path)


def wait_for_files(within_s: float | None = None) -> None:
    """Wait for all files of `async_save`."""
    if _own is not None:
        _own.maybe_finalize(blocking=True, within_s=within_s)


def _size_of(obj: object) -> int:
    counted = SparseFile()
    with torch.serialization.skip_data():
        torch.save(obj, cast("IO[bytes]", counted))
    return counted.tell()


def _fill(buffer: Buffer, obj: Any) -> None:
    """Without checksums, which nobody reads and which cost more than the copy."""
    had = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(obj, cast("IO[bytes]", _Into(buffer)))
    finally:
        torch.serialization.set_crc32_options(had)
