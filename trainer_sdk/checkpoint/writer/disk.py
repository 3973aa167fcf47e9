"""Large writes past the page cache: hashed in parallel, while the buffer is filled, at a limit."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from everstep.hashing import Hasher
from trainer_sdk.checkpoint.schedule.write_rate import Throttle

CHUNK_BYTES = 16 << 20
_MOST_CHUNK_BYTES = 64 << 20
_SHORT_S, _LONG_S = 0.25, 1.0
_THREADS = 2  # one writes while the other enters the kernel; more threads gain nothing

Going = Callable[[], None]


class GivenUpByRankError(Exception):
    """The rank has given up: the rest of the state will not arrive."""


class WriteGate:
    """Decides when bytes may be written: once they are in the buffer, and at the limited rate."""

    def __init__(self, there: int, stall_s: float = 0.0, bytes_per_s: int = 0) -> None:
        self._there = there
        """All bytes before this offset are in the buffer."""
        self.stall_s = stall_s
        """How long the training has waited; known once all bytes have arrived."""
        self._is_given_up = False
        self._news = threading.Condition()
        self._throttle = Throttle(bytes_per_s)

    def arrived(self, end: int, stall_s: float) -> None:
        """Note that all bytes before `end` have been in the buffer."""
        with self._news:
            self._there, self.stall_s = max(self._there, end), stall_s
            self._news.notify_all()

    def give_up(self) -> None:
        """Note that no more bytes arrive."""
        with self._news:
            self._is_given_up = True
            self._news.notify_all()

    def wait_for(self, end: int) -> None:
        """Wait until all bytes before `end` have arrived."""
        with self._news:
            self._news.wait_for(lambda: self._is_given_up or self._there >= end)
            if self._there < end:
                raise GivenUpByRankError

    def let(self, begin: int, end: int) -> None:
        """Wait until these bytes may be written."""
        self.wait_for(end)
        self._throttle.let(begin)

    @property
    def is_throttled(self) -> bool:
        """Whether there is a limit now."""
        return not self._throttle.is_lifted

    def hurry(self) -> None:
        """Lift the limit."""
        self._throttle.lift()


class StreamHash:
    """The hash of `size` bytes in the order of arrival; `then` is called with it at the end."""

    def __init__(self, size: int, then: Callable[[Hasher], None]) -> None:
        self._left = size
        self._hasher = Hasher()
        self._then = then
        if not size:
            then(self._hasher.copy())

    def update(self, octets: memoryview | bytes) -> None:
        """Add these bytes."""
        self._hasher.update(octets)
        self._left -= len(octets)
        if not self._left:
            self._then(self._hasher.copy())

    def hexdigest(self) -> str:
        """The hash of the bytes so far, in hex."""
        return self._hasher.hexdigest()


def write_hashed(
    path: str,
    size: int,
    windows: Iterable[memoryview],
    hashing: StreamHash | None,
    gate: WriteGate,
    going: Going,
) -> None:
    """Write a file of whole pages, window after window, and sync it; calls `going` at progress."""
    descriptor, at = _open(path), 0
    try:
        _check_room(descriptor, size)
        for octets in windows:
            _write(_ChunkQueue(descriptor, at, octets, gate), hashing, going)
            at += len(octets)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(chunks: "_ChunkQueue", hashing: StreamHash | None, going: Going) -> None:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="write") as pool:
        writing = [pool.submit(chunks.work) for _ in range(_THREADS)]
        try:
            if hashing is not None:
                hash_in_parts(chunks.all_octets(), hashing, going)
            while wait(writing, timeout=1.0, return_when=FIRST_EXCEPTION).not_done:
                chunks.report_to(going)
                if any(task.done() and task.exception() for task in writing):
                    break
        finally:
            chunks.stop()
        for task in writing:
            task.result()


def hash_in_parts(octets: memoryview, hashing: StreamHash | Hasher, going: Going) -> None:
    """Add these bytes to a hash."""
    for at in range(0, len(octets), CHUNK_BYTES):
        hashing.update(octets[at : at + CHUNK_BYTES])
        going()


class _ChunkQueue:
    """Chunks that wait to be written, each by a single thread."""

    def __init__(self, descriptor: int, begin: int, octets: memoryview, gate: WriteGate) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._octets = octets
        self._gate = gate
        self._taken, self._chunk = 0, CHUNK_BYTES
        self._taking = threading.Lock()
        self._written = self._reported = 0

    def work(self) -> None:
        """Write chunks until none is left."""
        while (taken := self._take()) is not None:
            at, end = taken
            self._gate.let(self._begin + at, self._begin + end)
            began = time.monotonic()
            while at < end:
                at += os.pwrite(self._descriptor, self._octets[at:end], self._begin + at)
            self._written += 1
            self._adapt(time.monotonic() - began)

    def all_octets(self) -> memoryview:
        """Wait for all bytes, and return them for the hash: it must not slow the copy down."""
        self._gate.wait_for(self._begin + len(self._octets))
        return self._octets

    def stop(self) -> None:
        """Take no more chunks."""
        with self._taking:
            self._taken = len(self._octets)
        self._gate.hurry()

    def report_to(self, going: Going) -> None:
        """Call `going` if there was progress."""
        if self._written != self._reported:
            self._reported = self._written
            going()

    def _take(self) -> tuple[int, int] | None:
        with self._taking:
            at, self._taken = self._taken, min(self._taken + self._chunk, len(self._octets))
            return (at, self._taken) if at < self._taken else None

    def _adapt(self, took_s: float) -> None:
        """Adapt the size of chunks: long ones while the disk is fast, as each wakes a thread."""
        if took_s < _SHORT_S and not self._gate.is_throttled:
            self._chunk = min(2 * self._chunk, _MOST_CHUNK_BYTES)
        elif took_s > _LONG_S:
            self._chunk = CHUNK_BYTES


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)  # the file system does not support direct writes


def _check_room(descriptor: int, needed: int) -> None:
    """Check the free space before anything is written."""
    about = os.fstatvfs(descriptor)
    if about.f_blocks and about.f_bavail * about.f_frsize < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
