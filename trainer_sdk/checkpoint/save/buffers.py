"""The memory that each save copies a rank's state into; it is mapped, and shared with the writer.

To allocate fresh memory takes thirty times as long as a copy, so it is allocated once and reused.
If images are kept, the memory outlives the process, and the next process of the rank has its state.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from everstep.evidence.files import read_regular
from trainer_sdk.checkpoint.image_folder import (
    ASIDE_INDEX,
    MARKED_INDEX,
    NUMERICS,
    RESTORED,
    RestoredState,
    is_on_disk,
    mark_restored,
)
from trainer_sdk.checkpoint.manifest import (
    IMAGE,
    INDEX,
    BadManifestError,
    Identity,
    ImageIndex,
    decode,
)

_PAGE = 4096
_MADV_POPULATE_WRITE = 23
_ENTERED_BYTES = 64 << 20
_library = ctypes.CDLL(None)
_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for all devices, not only for the present one."""
_NAMES = "abcdefgh"
MOST_BUFFERS = len(_NAMES)
_LOCK = "lock"
_LOOK_EVERY_S = 0.02
_WITHIN_S = 10.0
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_NEVER = 1 << 62


def available_bytes(descriptor: int | None) -> int:
    """The free memory; if there is a file, also limited by its file system."""
    room = min(_of_machine(), _of_group())
    return room if descriptor is None else min(room, free_bytes(descriptor))


def free_bytes(descriptor: int) -> int:
    """The free bytes of this file's file system."""
    about = os.fstatvfs(descriptor)
    return about.f_bavail * about.f_frsize


def _of_machine() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return _NEVER
    return next(
        (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), _NEVER
    )


def _of_group() -> int:
    """The memory below the container's limit; its inactive page cache counts as free."""
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        details = (_CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return _NEVER
    if most == "max":
        return _NEVER
    cache = sum(int(line.split()[1]) for line in details if line.startswith(("inactive_file ",)))
    return max(0, int(most) - used + cache)


class NoRoomError(Exception):
    """There is not enough memory for a save; nothing was begun."""

    def __init__(self, place: str, needed_bytes: int, room_bytes: int, reason: str = "") -> None:
        super().__init__(
            reason
            or f"{place} has {room_bytes >> 20} MiB left, and the save needs "
            f"{-(-needed_bytes >> 20)} MiB there: give more (--shm-size or --memory of a "
            "container), or memory_limit to save in waves"
        )
        self.place = place
        self.needed_bytes = needed_bytes
        self.available_bytes = room_bytes


class TakenError(Exception):
    """Another process, or another Checkpointer of this one, uses these images."""


class Buffer:
    """Memory for one state: a file in a folder, or without a name, to end with the process."""

    def __init__(self, folder: str = "", *, is_on_disk: bool = False) -> None:
        self.folder = folder
        self.is_on_disk = is_on_disk
        self.path = os.path.join(folder, IMAGE) if folder else ""
        """The path by which the writer opens it."""
        self.size = 0
        self.filled_for: object = None
        """The plan whose fixed parts are in the buffer."""
        self.targets: list[torch.Tensor] = []
        """The places of that plan's pieces in the buffer."""
        index = _index_in(folder)
        self.holds = None if index is None else index.identity
        """The identity of the complete image in the buffer; None if there is none."""
        self.hash = "" if index is None else index.hash
        """The hash of that image."""
        self.others: Sequence[Buffer] = ()
        """The other buffers of the rank."""
        self.is_left = False
        """Whether the training has gone back to an older state than this image."""
        self.is_free = True
        self._descriptor = -1
        self._octets: torch.Tensor | None = None
        self._mapped: mmap.mmap | None = None
        self._pinned_by: int | None = None

    @property
    def step(self) -> int | None:
        """The step of the image that it holds."""
        return None if self.holds is None else self.holds.step

    @property
    def octets(self) -> torch.Tensor:
        """All bytes, as a tensor."""
        assert self._octets is not None, "a buffer is fitted before it is used"
        return self._octets

    @property
    def mapped(self) -> mmap.mmap:
        """All bytes, as a mapping."""
        assert self._mapped is not None, "a buffer is fitted before it is used"
        return self._mapped

    def fit(self, size: int) -> None:
        """Resize, and allocate all of the memory; `NoRoomError` if it cannot be had."""
        if self.size == size:
            return
        self.forget()
        self.close()
        self._descriptor = self._open(size)
        held = os.fstat(self._descriptor).st_blocks * 512
        place = self.folder or "the memory of this machine"
        room = held + self._available_bytes()
        if size > room:
            self.close()
            raise self._no_room(place, size, room)
        try:
            os.ftruncate(self._descriptor, size)
            os.posix_fallocate(self._descriptor, 0, size)
            self._mapped = mmap.mmap(self._descriptor, size)
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise self._no_room(place, size, room) from error
            why = f"{-(-size >> 20)} MiB in {place} cannot be had: {error.strerror}"
            limit = " (the limit of ulimit -f)" if error.errno == errno.EFBIG else ""
            raise NoRoomError(place, size, room, f"{why}{limit}") from error
        self._octets = torch.frombuffer(self._mapped, dtype=torch.uint8)
        _enter_pages(self._octets)
        self._pinned_by = _pin(self._octets)
        self.size = size

    def keep(self, identity: Identity, hash_: str) -> str:
        """Note that the image is complete; returns why an earlier one of the step stays instead.

        Of two images of a step, ranks could restore different ones.
        """
        for other in self.others:
            if other.holds == identity and not other.is_left:
                self.forget()
                change = "which has the same content"
                if other.hash != hash_:
                    change = "which stays: later changes are not in it"
                return f"memory has an image of step {identity.step} already, {change}"
        self.holds, self.hash = identity, hash_
        return ""

    def forget(self) -> None:
        """Remove the index: the image is not whole any more."""
        if self.folder:
            _unlink(self.folder, ASIDE_INDEX, INDEX)
        self.holds, self.is_left = None, False

    def close(self) -> None:
        """Release the memory; a file stays."""
        if self._octets is not None and self._pinned_by is not None:
            _unpin(self._octets, self._pinned_by)
        self._pinned_by = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._octets = self._mapped = None
        self.size = 0
        self.filled_for = None
        self.targets = []

    def remove(self) -> None:
        """Release the memory, and remove the file."""
        self.forget()
        self.close()
        if self.folder:
            _unlink(self.folder, MARKED_INDEX, IMAGE)
            with suppress(FileNotFoundError):
                os.rmdir(self.folder)

    def _available_bytes(self) -> int:
        if self.is_on_disk:
            return free_bytes(self._descriptor)
        return available_bytes(self._descriptor if self.folder else None)

    def _no_room(self, place: str, size: int, room: int) -> NoRoomError:
        reason = (
            f"the disk of {place} has {room >> 20} MiB left, and the save needs "
            f"{-(-size >> 20)} MiB there: free some space, or have local_root on a larger disk"
        )
        return NoRoomError(place, size, room, reason if self.is_on_disk else "")

    def _open(self, size: int) -> int:
        if self.folder:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                if os.stat(self.path).st_size > size:
                    os.unlink(self.path)  # to truncate it would kill processes that have it mapped
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        descriptor = os.memfd_create("everstep-save", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return descriptor


class Arena:
    """The buffers of a rank; with a folder, their images outlive this process."""

    def __init__(self, count: int, folder: str = "") -> None:
        self.folder = folder
        self._lock = _locked(folder) if folder else -1
        names = _NAMES[:count]
        self.is_on_disk = bool(folder) and is_on_disk(os.path.dirname(os.path.dirname(folder)))
        self.buffers = [
            Buffer(os.path.join(folder, name) if folder else "", is_on_disk=self.is_on_disk)
            for name in names
        ]
        for buffer in self.buffers:
            buffer.others = [other for other in self.buffers if other is not buffer]

    def restored(self, state: RestoredState) -> None:
        """Note the state that was restored: newer images are overwritten first."""
        for buffer in self.buffers:
            buffer.is_left = buffer.holds is not None and buffer.holds.age > state.identity.age
        if self.folder:
            with suppress(OSError):  # then the agent only sends images that are not needed
                mark_restored(Path(self.folder), state)

    def next(self) -> Buffer | None:
        """The buffer for the next save; None while all are in use."""
        return min(self.spare(), key=_age, default=None)

    def spare(self) -> list[Buffer]:
        """The buffers that may be filled. The newest complete image stays until a newer one exists.

        Images that the training has abandoned do not count: another rank may lack them.
        """
        whole = [
            buffer for buffer in self.buffers if buffer.holds is not None and not buffer.is_left
        ]
        newest = max(whole, key=_age, default=None) if self.folder else None
        return [buffer for buffer in self.buffers if buffer.is_free and buffer is not newest]

    def close(self, *, keeps_images: bool) -> None:
        """Release the memory; images stay with `keeps_images`."""
        for buffer in self.buffers:
            if keeps_images:
                buffer.close()
            else:
                buffer.remove()
        if self._lock < 0:
            return
        if not keeps_images:
            _unlink(self.folder, RESTORED, NUMERICS, _LOCK)
            _remove_empty(self.folder)
        if self._lock in _locks:  # otherwise this process is a fork of the holder
            _locks.remove(self._lock)
            os.close(self._lock)
        self._lock = -1


def folder_of(images: str, rank: int) -> str:
    """The folder of a rank's own buffers."""
    return os.path.join(images, "own", f"rank-{rank}")


def _age(buffer: Buffer) -> tuple[int, int, int]:
    return (-1, -1, -1) if buffer.holds is None or buffer.is_left else buffer.holds.age


def _index_in(folder: str) -> ImageIndex | None:
    path = os.path.join(folder, INDEX)
    try:
        return decode(read_regular(path), ImageIndex, path)
    except (OSError, BadManifestError):
        return None


def _locked(folder: str) -> int:
    """Lock the folder while this process lives; waits while a former process is ending."""
    if _is_held_here(folder):
        raise TakenError(
            f"another Checkpointer of this process has the images in {folder}, and there is one "
            "state of a rank in memory: close that one first, or give this one neither keep_memory "
            "nor memory_every"
        )
    deadline = time.monotonic() + _WITHIN_S
    while True:
        with suppress(FileNotFoundError):  # a former process has just removed the folder
            os.makedirs(folder, mode=0o700, exist_ok=True)
            held = _lock_in(folder)
            if held is not None:
                _locks.add(held)
                return held
        if time.monotonic() > deadline:
            raise TakenError(
                f"another process has the images in {folder}: give this training a job of its own "
                "(job=… or EVERSTEP_JOB)"
            )
        time.sleep(_LOOK_EVERY_S)


def _lock_in(folder: str) -> int | None:
    """Take the lock; None if another process has it, or has just removed it."""
    path = os.path.join(folder, _LOCK)
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), os.stat(path)):
            return held
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(held)
    return None


_locks: set[int] = set()


def _is_held_here(folder: str) -> bool:
    """Whether this process has the lock."""
    with suppress(FileNotFoundError):
        there = os.stat(os.path.join(folder, _LOCK))
        return any(os.path.samestat(os.fstat(lock), there) for lock in _locks)
    return False


def _let_go() -> None:
    """Release the locks in a forked child, such as a data worker: it may outlive its rank."""
    for lock in _locks:
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_let_go)


def _unlink(folder: str, *names: str) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def _remove_empty(folder: str) -> None:
    with suppress(OSError):
        for _ in range(3):
            os.rmdir(folder)
            folder = os.path.dirname(folder)


def _enter_pages(octets: torch.Tensor) -> None:
    """Fault in all pages before the copy; other threads run in the meantime."""
    for at in range(0, octets.numel(), _ENTERED_BYTES):
        part = octets[at : at + _ENTERED_BYTES]
        where = ctypes.c_void_p(part.data_ptr())
        if _library.madvise(where, ctypes.c_size_t(part.numel()), _MADV_POPULATE_WRITE):
            part[::_PAGE].add_(0)  # before Linux 5.14


def _pin(octets: torch.Tensor) -> int | None:
    """Pin the memory, so that CUDA copies into it asynchronously.

    Returns the device that has done so; None if none is in use, or has refused: it may lack
    permission, or the folder's file system may not allow it. Copies then wait, and are right.
    """
    device = _device_in_use()
    if device is None:
        return None
    with torch.cuda.device(device):
        if not int(_cudart().cudaHostRegister(octets.data_ptr(), octets.numel(), _PORTABLE)):
            return device
        with suppress(RuntimeError):  # else the next kernel of the training raises this error
            torch.zeros((), device="cuda")
    return None


def _unpin(octets: torch.Tensor, device: int) -> None:
    with torch.cuda.device(device):
        _cudart().cudaHostUnregister(octets.data_ptr())


def _device_in_use() -> int | None:
    """A device on which this process has a context.

    A thread begins with device 0: without this, each rank of a node would open a context there.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # noqa: SLF001
    return next((at for at in range(torch.cuda.device_count()) if has_context(at)), None)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
