"""Reads what the kernel has logged since the last read, and never waits for more."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_RECORD_BYTES = 8192  # no record of /dev/kmsg is longer
_MOST_RECORDS = 200_000
"""If the kernel logs faster than this, the rest is read at the next look."""


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One message."""

    sequence: int
    at: float
    """Seconds since the boot."""
    text: str


@dataclass(frozen=True, slots=True)
class KernelRead:
    """The result of a read."""

    records: tuple[KernelRecord, ...]
    """The kernel's own messages; programs' lines in its log are left out."""
    position: int
    """The sequence number of the last message, including those of programs."""
    lost: int = 0
    """The number of messages that the kernel had overwritten before they were read."""
    has_more: bool = False


def read(path: Path, after: int, most: int = _MOST_RECORDS) -> KernelRead:
    """The records after a position; -1 for all that the kernel still has.

    Raises OSError if the log may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _read(descriptor, after, most)
    finally:
        os.close(descriptor)


def _read(descriptor: int, after: int, most: int) -> KernelRead:
    records: list[KernelRecord] = []
    position, lost, rest, reads = after, 0, b"", 0
    for data in _chunks(descriptor, most):
        reads += 1
        # the device gives one record for each read, a plain file as much as fits
        *lines, rest = (rest + data).split(b"\n")
        for record, is_own in filter(None, map(_parsed, lines)):
            if record.sequence <= position:
                continue
            if position >= 0:
                lost += record.sequence - 1 - position
            position = record.sequence
            if is_own:
                records.append(record)
    return KernelRead(tuple(records), position, lost, has_more=reads == most)


def _chunks(descriptor: int, most: int) -> Iterator[bytes]:
    while most:
        try:
            data = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # overwritten while it was read; the next read continues behind it
            continue
        if not data:
            return
        yield data
        most -= 1


def _parsed(line: bytes) -> tuple[KernelRecord, bool] | None:
    """A record, and whether the kernel wrote it; None for the continuation of one."""
    head, separator, text = line.decode(errors="replace").partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not all(field.isdecimal() for field in fields[:3]):
        return None
    priority, sequence, micros = map(int, fields[:3])
    return KernelRecord(sequence, micros / 1e6, text), priority >> 3 == 0
