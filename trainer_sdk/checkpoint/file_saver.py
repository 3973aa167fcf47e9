"""Writes single files in the background, as `torch.save` does, without the wait for the disk."""

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import IO, Protocol, cast

import torch

from trainer_sdk.checkpoint import arguments, script_end
from trainer_sdk.checkpoint.events import Reporter
from trainer_sdk.checkpoint.save.buffers import MOST_BUFFERS, Arena, Buffer, NoRoomError
from trainer_sdk.checkpoint.save.request import (
    ON_ERROR,
    NotBegun,
    OnError,
    Save,
    SaveError,
    SaveHandle,
    Timeouts,
)
from trainer_sdk.checkpoint.save.save_queue import SaveQueue
from trainer_sdk.checkpoint.torch_format import SparseFile
from trainer_sdk.checkpoint.writer.protocol import SaveFailed, WriteFile
from trainer_sdk.environment import environ

_PAGE = 4096
_LOOK_EVERY_S = 0.005


class FileContent(Protocol):
    """What a file shall have."""

    @property
    def size_bytes(self) -> int:
        """Its size."""

    def fill(self, into: mmap.mmap) -> None:
        """Write all of it to the begin of `into`, which is at least as large."""


class FileSaver:
    """A queue of files. Each file has the object as it was when `schedule` was called."""

    def __init__(
        self, on_error: OnError = "warn", *, in_flight: int = 1, timeouts: Timeouts | None = None
    ) -> None:
        arguments.one_of("on_error", on_error, ON_ERROR)
        in_flight = arguments.whole("in_flight", in_flight, 1, MOST_BUFFERS)
        rank = environ.get("RANK", "0")
        self._timeouts = arguments.instance("timeouts", timeouts, Timeouts)
        self._queue = SaveQueue(int(rank), Reporter(int(rank), None), on_error, self._timeouts)
        self._arena = Arena(in_flight)
        self._scheduling = threading.RLock()
        """Each scheduling thread has a separate buffer; a call by a signal handler is refused."""
        self._pid = os.getpid()
        self._is_closed = False
        self._ending = script_end.OpenSaver(
            self._queue.await_all, lambda _: self._close(abort=False)
        )
        script_end.remember(self._ending)

    @property
    def unfinished(self) -> int:
        """The number of files that were scheduled and are not finalized."""
        return self._queue.unfinished

    def schedule(
        self,
        obj: object,
        path: "str | os.PathLike[str]",
        finalize: tuple[Callable[[], None], ...] = (),
    ) -> SaveHandle:
        """Copy the object now, and write it later; the handle shows the state of the save.

        This waits while earlier files use all the memory. After `close`, and in exit handlers, it
        waits for the file itself. `maybe_finalize` calls `finalize` once the file is durable.
        """
        return self.schedule_content(
            TorchFile(obj), path, arguments.functions("finalize", finalize)
        )

    def schedule_content(
        self,
        content: FileContent,
        path: "str | os.PathLike[str]",
        finalize: tuple[Callable[[], None], ...] = (),
        *,
        is_hashed: bool = False,
    ) -> SaveHandle:
        """The same for content of any kind; with `is_hashed`, the handle has the file's hash."""
        where = arguments.path("path", path)
        where = where if "://" in where else _file_at(where)
        with self._scheduling, self._queue.beginning(None, where) as refused:
            if refused is not None:
                return self._handle(refused)
            with torch.inference_mode(mode=False):  # later files use the memory of this one
                handle = self._handle(self._schedule(content, where, finalize, is_hashed=is_hashed))
        if self._is_closed or not threading.main_thread().is_alive():
            self.close()  # exit handlers have run already
        return handle

    def maybe_finalize(self, blocking: bool = False, within_s: float | None = None) -> list[int]:
        """Call the `finalize` functions of files that are durable; returns the files' numbers."""
        return self._queue.maybe_finalize(*arguments.wait(blocking, within_s))

    def close(self, abort: bool = False) -> None:
        """Wait for the last file, with a bound, or abandon it; then release all resources."""
        failure = self._close(abort)
        if failure is not None:
            raise failure

    def _close(self, abort: bool) -> SaveError | None:
        if os.getpid() != self._pid:
            return None
        self._is_closed = True
        script_end.forget(self._ending)
        try:
            return self._queue.close(abort)
        finally:
            self._arena.close(keeps_images=False)

    def _handle(self, save: Save | NotBegun) -> SaveHandle:
        return SaveHandle(save, self._queue.hurry)

    def _schedule(
        self,
        content: FileContent,
        where: str,
        finalize: tuple[Callable[[], None], ...],
        *,
        is_hashed: bool,
    ) -> Save | NotBegun:
        called_at = time.monotonic()
        size = content.size_bytes
        buffer = self._buffer(size, where)
        if isinstance(buffer, NotBegun):
            return buffer
        save = self._queue.begin(None, buffer, finalize, called_at)
        order = WriteFile(
            save=save.number, image=buffer.path, size_bytes=size, path=where, is_hashed=is_hashed
        )
        save.order = order
        try:
            content.fill(buffer.mapped)
            save.stall_s = time.monotonic() - called_at
            self._queue.send(save, order)
        except BaseException as error:  # also Ctrl-C: otherwise the end would wait for this save
            reason = f"{type(error).__name__}: {error}"
            failed = SaveFailed(
                save=save.number, stage="copy", reason=reason, error="copy", place=where
            )
            self._queue.fail(save, failed)
            if not isinstance(error, Exception):  # only `Exception`s follow the policy
                raise
        return save

    def _buffer(self, size: int, where: str) -> Buffer | NotBegun:
        """A buffer of this size; the reason, if there is none and the policy is not fatal."""
        within_s = self._timeouts.write_within_s
        deadline = time.monotonic() + within_s
        while (buffer := self._arena.next()) is None:
            if time.monotonic() > deadline:
                before = ", ".join(self._queue.waiting_places())
                reason = (
                    f"the files before it ({before}) have had all the memory for {within_s:g} s: "
                    "look at that storage, or give in_flight=2"
                )
                return self._queue.refuse(None, "memory", reason, place=where)
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
            return self._queue.refuse(None, "memory", reason, place=where)
        return buffer


class TorchFile:
    """An object as `torch.save` writes it."""

    def __init__(self, obj: object) -> None:
        self._obj = obj
        counted = SparseFile()
        with torch.serialization.skip_data():
            torch.save(obj, cast("IO[bytes]", counted))
        self.size_bytes = counted.tell()

    def fill(self, into: mmap.mmap) -> None:
        """Copy without checksums: `torch.load` ignores them, and they cost more than the copy."""
        had = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            file = _Into(into, self.size_bytes)
            torch.save(self._obj, cast("IO[bytes]", file))
        finally:
            torch.serialization.set_crc32_options(had)
        if file.tell() != self.size_bytes:
            raise ValueError(
                f"it grew or shrank to {file.tell()} bytes while it was copied, and had "
                f"{self.size_bytes}"
            )


class _Into:
    """A file object that writes into a buffer."""

    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        self._mapped = mapped
        self._size = size
        self._at = 0

    def write(self, octets: memoryview) -> int:
        if (
            self._at + len(octets) <= self._size
        ):  # beyond the size nothing is written; `fill` raises at the end
            self._mapped[self._at : self._at + len(octets)] = octets
        self._at += len(octets)
        return len(octets)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def _file_at(path: str) -> str:
    """The path that `torch.save` would write: the target of a symbolic link."""
    where = os.path.abspath(path)
    if os.path.islink(where):
        where = os.path.realpath(where)
    if os.path.lexists(where) and not os.path.isfile(where):
        flaw = "leads to itself" if os.path.islink(where) else "is not a regular file"
        raise ValueError(f"{path} {flaw}, and would be replaced: use torch.save, or another path")
    return where


_own: FileSaver | None = None
_opening = threading.RLock()


def async_save(obj: object, path: "str | os.PathLike[str]") -> SaveHandle:
    """Like `torch.save`, but the file is written in the background; `torch.load` reads it.

    The file appears whole or not at all. The interpreter waits for it before it ends. A failure is
    printed, and the handle has it. Any thread and any forked process may call this.
    """
    global _own  # noqa: PLW0603 - a process has one
    with _opening:
        if _own is None:
            _own = FileSaver()
        _own.maybe_finalize()
        return _own.schedule(obj, path)


def wait_for_files(within_s: float | None = None) -> None:
    """Wait until all files of `async_save` are written."""
    bound = arguments.wait(blocking=True, within_s=within_s)
    if _own is not None:
        _own.maybe_finalize(*bound)


def _forget() -> None:
    """Forget the parent's saver in a forked child."""
    global _own, _opening
    _own, _opening = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)
