"""Large writes past the page cache, with the hash made beside them."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from xxhash import xxh3_128

from trainer_sdk.checkpoint.writer.passage import Passage

CHUNK_BYTES = 16 << 20
_MOST_CHUNK_BYTES = 64 << 20
_SHORT_S, _LONG_S = 0.25, 1.0
_THREADS = 2  # one writes while the other is on its way into the kernel; more gain nothing

Going = Callable[[], None]


def write_hashed(
    path: str,
    size: int,
    windows: Iterable[memoryview],
    hasher: xxh3_128,
    passage: Passage,
    going: Going,
) -> None:
    """Write a file of whole pages, window after window, and sync it; `going` hears of progress."""
    descriptor, at = _open(path), 0
    try:
        _check_room(descriptor, size)
        for octets in windows:
            _write(_Line(descriptor, at, octets, passage), hasher, going)
            at += len(octets)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(line: "_Line", hasher: xxh3_128, going: Going) -> None:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="write") as pool:
        writing = [pool.submit(line.work) for _ in range(_THREADS)]
        try:
            for octets in line.once_all_is_there():
                hash_in_parts(octets, hasher, going)
            while wait(writing, timeout=1.0, return_when=FIRST_EXCEPTION).not_done:
                line.news_for(going)
                if any(one.done() and one.exception() for one in writing):
                    break
        finally:
            line.stop()
        for one in writing:
            one.result()


def hash_in_parts(octets: memoryview, hasher: xxh3_128, going: Going) -> None:
    """Add these bytes to a hash."""
    for at in range(0, len(octets), CHUNK_BYTES):
        hasher.update(octets[at : at + CHUNK_BYTES])
        going()


class _Line:
    """Chunks that wait to be written; each is taken by one thread."""

    def __init__(self, descriptor: int, begin: int, octets: memoryview, passage: Passage) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._octets = octets
        self._passage = passage
        self._taken, self._chunk = 0, CHUNK_BYTES
        self._taking = threading.Lock()
        self._written = self._told = 0

    def work(self) -> None:
        """Write until there is nothing left."""
        while (taken := self._take()) is not None:
            at, end = taken
            self._passage.let(self._begin + at, self._begin + end)
            began = time.monotonic()
            while at < end:
                at += os.pwrite(self._descriptor, self._octets[at:end], self._begin + at)
            self._written += 1
            self._adapt(time.monotonic() - began)

    def once_all_is_there(self) -> Iterator[memoryview]:
        """The same chunks for the hash, which is quick: whoever copies them has the processor."""
        end = self._begin + len(self._octets)
        for at in range(0, len(self._octets), CHUNK_BYTES):
            self._passage.let(self._begin + at, end)
            yield self._octets[at : at + CHUNK_BYTES]

    def stop(self) -> None:
        """Take nothing more."""
        with self._taking:
            self._taken = len(self._octets)
        self._passage.hurry()

    def news_for(self, going: Going) -> None:
        """Tell of progress, if there was some."""
        if self._written != self._told:
            self._told = self._written
            going()

    def _take(self) -> tuple[int, int] | None:
        with self._taking:
            at, self._taken = self._taken, min(self._taken + self._chunk, len(self._octets))
            return (at, self._taken) if at < self._taken else None

    def _adapt(self, took_s: float) -> None:
        """Long writes while the disk takes them at once: each wakes a thread on a busy machine."""
        if took_s < _SHORT_S and not self._passage.is_throttled:
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
        return os.open(path, flags, 0o666)  # a file system that has no other way than its cache


def _check_room(descriptor: int, needed: int) -> None:
    """Before anything is written that would be in the way of others."""
    about = os.fstatvfs(descriptor)
    if about.f_blocks and about.f_bavail * about.f_frsize < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
