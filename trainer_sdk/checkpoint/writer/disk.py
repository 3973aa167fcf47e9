"""Large writes past the page cache, with the hash made beside them."""

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from xxhash import xxh3_128

from trainer_sdk.checkpoint.throttle import Throttle

CHUNK_BYTES = 16 << 20
_THREADS = 2  # one writes while the other is on its way into the kernel; more gain nothing

Going = Callable[[], None]


def write_hashed(
    path: str,
    size: int,
    windows: Iterable[memoryview],
    hasher: xxh3_128,
    throttle: Throttle,
    going: Going,
) -> None:
    """Write a file of whole pages, window after window, and sync it; `going` hears of progress."""
    descriptor, at = _open(path), 0
    try:
        _check_room(descriptor, size)
        for octets in windows:
            _write(_Line(descriptor, at, octets, throttle), hasher, going)
            at += len(octets)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(line: "_Line", hasher: xxh3_128, going: Going) -> None:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="write") as pool:
        writing = [pool.submit(line.work) for _ in range(_THREADS)]
        try:
            for octets in line.as_they_may_pass():
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

    def __init__(self, descriptor: int, begin: int, octets: memoryview, throttle: Throttle) -> None:
        self._descriptor = descriptor
        self._begin = begin
        self._octets = octets
        self._throttle = throttle
        self._starts = iter(range(0, len(octets), CHUNK_BYTES))
        self._taking = threading.Lock()
        self._written = self._told = 0

    def work(self) -> None:
        """Write until there is nothing left."""
        while (at := self._take()) is not None:
            end = min(at + CHUNK_BYTES, len(self._octets))
            self._throttle.let(self._begin + at)
            while at < end:
                at += os.pwrite(self._descriptor, self._octets[at:end], self._begin + at)
            self._written += 1

    def as_they_may_pass(self) -> Iterator[memoryview]:
        """The same chunks for whoever does something else with them meanwhile."""
        for at in range(0, len(self._octets), CHUNK_BYTES):
            self._throttle.let(self._begin + at)
            yield self._octets[at : at + CHUNK_BYTES]

    def stop(self) -> None:
        """Take nothing more."""
        with self._taking:
            self._starts = iter(())
        self._throttle.lift()

    def news_for(self, going: Going) -> None:
        """Tell of progress, if there was some."""
        if self._written != self._told:
            self._told = self._written
            going()

    def _take(self) -> int | None:
        with self._taking:
            return next(self._starts, None)


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
