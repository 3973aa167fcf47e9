"""Single files in the background: what `torch.save` writes, without the wait for the disk."""

import os
import threading
import time
from collections.abc import Callable
from typing import IO, Any, cast

import torch

from trainer_sdk.checkpoint import leaving
from trainer_sdk.checkpoint.arena import Arena, Buffer, NoRoomError
from trainer_sdk.checkpoint.save import OnError, Patience, SaveError
from trainer_sdk.checkpoint.saves import SaveQueue
from trainer_sdk.checkpoint.telling import Teller
from trainer_sdk.checkpoint.template import SparseFile
from trainer_sdk.checkpoint.writer.orders import Failed, WriteFile

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
        self._is_closed = False
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
    ) -> int | None:
        """Take the object as it is now, and write it later; the number of this save.

        It waits while earlier ones have all the memory, and for the file itself after `close`, or
        where an exit handler calls it. `finalize` is called by `maybe_finalize` once the file is
        durable. None if it was not begun, which was said.
        """
        where = os.fspath(path)
        where = where if "://" in where else os.path.abspath(where)
        with self._queue.beginning(None, where) as may_begin:
            if not may_begin:
                return None
            number = self._schedule(obj, where, finalize)
        if self._is_closed or not threading.main_thread().is_alive():
            self._close(abort=False)  # whoever would do so has done it
        return number

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
        self._is_closed = True
        leaving.forget(self)
        try:
            return self._queue.close(abort)
        finally:
            self._arena.close(keeps_images=False)

    def _schedule(
        self, obj: object, where: str, finalize: tuple[Callable[[], None], ...]
    ) -> int | None:
        called_at = time.monotonic()
        size = _size_of(obj)
        buffer = self._buffer(size, where)
        if buffer is None:
            return None
        save = self._queue.begin(None, buffer, finalize, called_at)
        order = WriteFile(save=save.number, image=buffer.path, size_bytes=size, path=where)
        save.order = order
        try:
            _fill(buffer, obj, size)
            save.stall_s = time.monotonic() - called_at
            self._queue.delivery.send(save, order)
        except BaseException as error:  # also Ctrl-C: the end would wait for this save
            reason = f"{type(error).__name__}: {error}"
            failed = Failed(
                save=save.number, stage="copy", reason=reason, error="copy", place=where
            )
            self._queue.delivery.fail(save, failed)
            if not isinstance(error, Exception):  # of the others, the policy says what follows
                raise
        return save.number

    def _buffer(self, size: int, where: str) -> Buffer | None:
        """Memory for it; None if there is none, and the policy allows to go on."""
        within_s = self._patience.write_within_s
        deadline = time.monotonic() + within_s
        while (buffer := self._arena.next()) is None:
            if time.monotonic() > deadline:
                before = ", ".join(self._queue.waiting_places())
                reason = (
                    f"the files before it ({before}) have had all the memory for {within_s:g} s: "
                    "look at that storage, or give in_flight=2"
                )
                self._queue.refuse(None, "memory", reason, place=where)
                return None
            time.sleep(_LOOK_EVERY_S)
        try:
            if buffer.size < size:
                buffer.fit(-(-(size + size // 8) // _PAGE) * _PAGE)
        except NoRoomError as error:
            reason = (
                f"{error.place} has {error.available_bytes >> 20} MiB left, and the copy needs "
                f"{-(-size >> 20)} MiB: give more (--memory of a container), or use torch.save, "
                "which needs no copy"
            )
            self._queue.refuse(None, "memory", reason, place=where)
            return None
        return buffer


class _Into:
    """Writes to a buffer, as to a file."""

    def __init__(self, buffer: Buffer, size: int) -> None:
        self._mapped = buffer.mapped
        self._size = size
        self._at = 0

    def write(self, octets: memoryview) -> int:
        if self._at + len(octets) <= self._size:  # else it is too large, which is found at the end
            self._mapped[self._at : self._at + len(octets)] = octets
        self._at += len(octets)
        return len(octets)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """Nothing is held back."""


_own: FileSaves | None = None
_opening = threading.RLock()


def async_save(obj: object, path: "str | os.PathLike[str]") -> int | None:
    """Like `torch.save`, but the file is written in the background; `torch.load` reads it.

    The file appears whole or not at all. The end of the interpreter waits for it. What fails is
    said, and None is returned where it was not even begun. Any thread may call it, and a fork.
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


def _forget() -> None:
    """In a fork: the memory of its parent is not its own."""
    global _own, _opening
    _own, _opening = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)


def _size_of(obj: object) -> int:
    counted = SparseFile()
    with torch.serialization.skip_data():
        torch.save(obj, cast("IO[bytes]", counted))
    return counted.tell()


def _fill(buffer: Buffer, obj: Any, size: int) -> None:
    """Without checksums, which nobody reads and which cost more than the copy."""
    had = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        into = _Into(buffer, size)
        torch.save(obj, cast("IO[bytes]", into))
    finally:
        torch.serialization.set_crc32_options(had)
    if into.tell() != size:
        raise ValueError(f"it has become {into.tell()} bytes while it was copied, and was {size}")
