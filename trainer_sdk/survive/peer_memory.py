"""Reads the memory of another process of this user on the same node, in one copy."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from everstep.hashing import Hasher

_library = ctypes.CDLL(None, use_errno=True)
_CHUNK = 1 << 20
"""It is hashed while it is in the processor's cache."""
_SET_PTRACER, _ANY, _NOBODY = 0x59616D61, ctypes.c_ulong(-1), ctypes.c_ulong(0)
_TOKEN_BYTES = 16


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


_readv = _library.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Span),
    ctypes.c_ulong,
    ctypes.POINTER(_Span),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class PeerMemoryError(OSError):
    """The memory of the other process cannot be read."""


class MemoryToken:
    """Random bytes at an address: who reads them there has reached the right process."""

    def __init__(self) -> None:
        self.octets = os.urandom(_TOKEN_BYTES)
        self._memory = ctypes.create_string_buffer(self.octets, _TOKEN_BYTES)
        self.address = ctypes.addressof(self._memory)

    @staticmethod
    def is_at(pid: int, address: int, octets: bytes) -> bool:
        """Whether the process with this pid, as this process sees it, has these bytes there."""
        memory = ctypes.create_string_buffer(len(octets))
        try:
            _read(pid, address, ctypes.addressof(memory), len(octets))
        except OSError:
            return False
        return memory.raw == octets


@contextmanager
def readable_memory() -> Iterator[None]:
    """Let other processes of this user read this one's memory, where Yama would not let them."""
    _library.prctl(_SET_PTRACER, _ANY, 0, 0, 0)
    try:
        yield
    finally:
        _library.prctl(_SET_PTRACER, _NOBODY, 0, 0, 0)


def read_memory(pid: int, source: int, target: int, length: int, into: Hasher) -> None:
    """Copy from an address of the process to one of this process, and hash what has arrived."""
    for at in range(0, length, _CHUNK):
        size = min(_CHUNK, length - at)
        _read(pid, source + at, target + at, size)
        hash_memory(target + at, size, into)


def hash_memory(address: int, length: int, into: Hasher) -> None:
    """Hash what lies at an address of this process."""
    memory: Any = (ctypes.c_char * length).from_address(address)
    into.update(memory)


def _read(pid: int, source: int, target: int, length: int) -> None:
    at = 0
    while at < length:
        here, there = _Span(target + at, length - at), _Span(source + at, length - at)
        copied = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            error = ctypes.get_errno()
            raise PeerMemoryError(error, f"process {pid}: {os.strerror(error)}")
        at += copied
