"""The TCP connections of ranks, from the kernel's sock_diag; empty where that is missing.

For each connection the kernel counts retransmissions, and measures round trips.
"""

import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
_INFO = 2  # INET_DIAG_INFO
_ESTABLISHED = 1 << 1
_WITHIN_S = 0.2
_MOST_SOCKETS = 20_000
_MOST_FILES = 4096

_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_MESSAGE = struct.Struct("=4B48sIIIII")
_ATTRIBUTE = struct.Struct("=HH")
_COUNTERS = struct.Struct("=I")
_LONG_COUNTERS = struct.Struct("=Q")
# Of tcp_info: tcpi_rtt, tcpi_total_retrans, tcpi_bytes_acked.
_ROUND_TRIP_AT, _RETRANSMITS_AT, _ACKED_AT = 68, 100, 120


@dataclass(frozen=True, slots=True)
class TcpConnection:
    """A connection, by the inode of its socket."""

    inode: int
    unsent_bytes: int
    """Bytes written, and not yet acknowledged by the other end."""
    round_trip_s: float
    retransmits: int
    """Retransmitted segments, since it was made."""
    sent_bytes: int
    """Bytes acknowledged by the other end, since it was made."""


def connections() -> Mapping[int, TcpConnection]:
    """All established connections of this network namespace, by inode; empty where not known."""
    by_inode: dict[int, TcpConnection] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.settimeout(_WITHIN_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                request = _REQUEST.pack(
                    family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED, b""
                )
                size = _HEADER.size + len(request)
                kernel.send(_HEADER.pack(size, _BY_FAMILY, _DUMP, 1, 0) + request)
                for connection in _answers(kernel):
                    by_inode[connection.inode] = connection
    except (OSError, struct.error):
        return {}  # an old kernel, a sandbox, or one without the module tcp_diag
    return by_inode


def inodes_of(pid: int, proc: Path = Path("/proc")) -> frozenset[int]:
    """The sockets that a process has open."""
    inodes = set()
    folder = str(proc / str(pid) / "fd")
    try:
        for name in os.listdir(folder)[:_MOST_FILES]:
            target = _link(f"{folder}/{name}")
            if target.startswith("socket:["):
                inodes.add(int(target[len("socket:[") : -1]))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(inodes)


def of_process(
    by_inode: Mapping[int, TcpConnection], inodes: Collection[int]
) -> list[TcpConnection]:
    """The connections of one process."""
    return [by_inode[inode] for inode in inodes if inode in by_inode]


def parse_connections(octets: bytes) -> tuple[list[TcpConnection], bool]:
    """The connections in one answer of the kernel, and whether it is the last."""
    sockets: list[TcpConnection] = []
    at = 0
    while at + _HEADER.size <= len(octets):
        size, kind, _, _, _ = _HEADER.unpack_from(octets, at)
        if kind in {_DONE, _ERROR} or size < _HEADER.size:
            return sockets, True
        connection = _connection(octets[at + _HEADER.size : at + size])
        if connection is not None:
            sockets.append(connection)
        at += (size + 3) & ~3
    return sockets, False


def _answers(kernel: socket.socket) -> Iterator[TcpConnection]:
    count, is_last = 0, False
    while not is_last and count < _MOST_SOCKETS:
        sockets, is_last = parse_connections(kernel.recv(1 << 18))
        count += len(sockets)
        yield from sockets


def _connection(message: bytes) -> TcpConnection | None:
    *_, unsent_bytes, _, inode = _MESSAGE.unpack_from(message)
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if size < _ATTRIBUTE.size:
            return None
        info = message[at + _ATTRIBUTE.size : at + size]
        if kind == _INFO and len(info) >= _ACKED_AT + _LONG_COUNTERS.size:
            (round_trip_us,) = _COUNTERS.unpack_from(info, _ROUND_TRIP_AT)
            (retransmits,) = _COUNTERS.unpack_from(info, _RETRANSMITS_AT)
            (sent_bytes,) = _LONG_COUNTERS.unpack_from(info, _ACKED_AT)
            return TcpConnection(inode, unsent_bytes, round_trip_us / 1e6, retransmits, sent_bytes)
        at += (size + 3) & ~3
    return None


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # it was closed meanwhile
