"""Connections from rank to rank, for a byte that ranks wait for in each step.

A message of gloo's own wakes a thread at its end, is announced by another one, and makes objects at
both: that takes several times as much of the processor. gloo still serves where a rank cannot be
reached by such a connection.
"""

import fcntl
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from time import monotonic

import msgspec

from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.environment import environ

_CONNECT_S = 5.0
_TOKEN_BYTES = 16
_SIOCGIFADDR = 0x8915
_OCTETS = [bytes([octet]) for octet in range(256)]


class RankAddress(msgspec.Struct, frozen=True):
    """Where a rank listens, and what the ranks that connect must know; no port if it cannot."""

    host: str = ""
    port: int = 0
    token: str = ""


class ByteLink:
    """A connection to a rank ahead, and the one from a rank behind."""

    def __init__(
        self, ahead: socket.socket, behind: socket.socket, source: int, limit_s: float
    ) -> None:
        self._ahead, self._behind = ahead, behind
        self._source, self._limit_s = source, limit_s
        ahead.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        behind.settimeout(None)
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        behind.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)  # without a call of poll

    def passed_on(self, own: int) -> int:
        """Send this byte; return that of the rank behind."""
        self._ahead.send(_OCTETS[own])
        try:
            octet = self._behind.recv(1)
        except BlockingIOError:
            raise TimeoutError(
                f"Timed out waiting {self._limit_s * 1000:.0f}ms for recv of the decision of "
                f"rank {self._source}"
            ) from None
        if not octet:
            raise ConnectionError(
                f"Connection closed by peer: rank {self._source} has ended, or decides no more"
            )
        return octet[0]

    def __del__(self) -> None:
        self._ahead.close()
        self._behind.close()


def linked(ranks: RankGroup, distances: Sequence[int], limit_s: float) -> list[ByteLink]:
    """Connect to the rank so far ahead, for each distance; empty if any rank could not.

    All ranks call it together.
    """
    with ExitStack() as opened:
        own = RankAddress()
        with suppress(OSError):
            host = _own_host()
            listener = opened.enter_context(socket.create_server((host, 0), backlog=ranks.size))
            port = listener.getsockname()[1]
            own = RankAddress(host, port, os.urandom(_TOKEN_BYTES).hex())
        addresses = ranks.gather(own, RankAddress)
        links: list[ByteLink] = []
        if all(address.port for address in addresses):
            with suppress(OSError):
                ahead = [
                    opened.enter_context(
                        _connected(addresses[(ranks.rank + far) % ranks.size], number)
                    )
                    for number, far in enumerate(distances)
                ]
                behind = _accepted(listener, own.token, len(distances), opened)
                sources = [(ranks.rank - far) % ranks.size for far in distances]
                links = [
                    ByteLink(*ends, limit_s) for ends in zip(ahead, behind, sources, strict=True)
                ]
        if not all(ranks.gather(bool(links), bool)):
            return []
        opened.pop_all()
        listener.close()
        return links


def _own_host() -> str:
    """The address that gloo uses: of the interface that the user has named, or of the host."""
    name = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24])
    host = socket.gethostbyname(socket.gethostname())
    with socket.create_server((host, 0)):
        return host


def _connected(address: RankAddress, number: int) -> socket.socket:
    link = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
    link.sendall(bytes.fromhex(address.token) + _OCTETS[number])
    link.settimeout(None)
    return link


def _accepted(
    listener: socket.socket, token: str, count: int, opened: ExitStack
) -> list[socket.socket]:
    """The connections of the ranks behind, in the order of their numbers."""
    links: dict[int, socket.socket] = {}
    until = monotonic() + _CONNECT_S
    while len(links) < count:
        listener.settimeout(max(until - monotonic(), 0.001))
        link = opened.enter_context(listener.accept()[0])
        link.settimeout(_CONNECT_S)
        octets = b""
        with suppress(OSError):
            octets = link.recv(_TOKEN_BYTES + 1, socket.MSG_WAITALL)
        if hmac.compare_digest(octets[:-1], bytes.fromhex(token)):
            links[octets[-1]] = link
        else:
            link.close()
    return [links[number] for number in range(count)]
