"""The warden's port for liveness: other nodes ask it whether it lives while its agent is silent.

One datagram in, one of the same size out. The warden answers only callers that know its token,
which its agent publishes in its beats.
"""

import os
import socket
from dataclasses import dataclass

_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}
_LONGEST = 64
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class LivenessPort:
    """Where a warden can be asked, and the token that it wants."""

    address: str
    port: int
    token: str


def opened_liveness_port(address: str) -> tuple[socket.socket, LivenessPort] | None:
    """A socket that other nodes can reach; None if there is none, so that nobody asks."""
    if not address:
        return None
    try:
        door = socket.socket(family_of(address), socket.SOCK_DGRAM)
    except OSError:
        return None
    try:
        door.settimeout(0)
        door.bind((_LOOPBACK.get(address, ""), 0))
    except OSError:
        door.close()
        return None
    return door, LivenessPort(address, door.getsockname()[1], os.urandom(16).hex())


def family_of(address: str) -> socket.AddressFamily:
    """The address family of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def answer_all(door: socket.socket, token: str) -> None:
    """Answer the callers that wait, up to a fixed number at once."""
    for _ in range(_AT_ONCE):
        try:
            question, caller = door.recvfrom(_LONGEST)
            if question == token.encode():
                door.sendto(answer(token), caller)
        except OSError:
            return  # no caller is left, or the answer cannot be sent


def answer(token: str) -> bytes:
    """The warden's answer, which proves that it has read the token and is not a mere echo."""
    return token[::-1].encode()
