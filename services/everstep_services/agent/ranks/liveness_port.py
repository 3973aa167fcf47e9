"""The warden's door: other nodes ask whether it lives while its agent is not heard.

One datagram in, one of the same size out. It answers only who knows its token, which the agent
tells in its beats.
"""

import os
import socket
from dataclasses import dataclass

_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}
_LONGEST = 64
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class LivenessPort:
    """Where a warden can be asked."""

    address: str
    port: int
    token: str


def opened_liveness_port(address: str) -> tuple[socket.socket, LivenessPort] | None:
    """A socket that other nodes can reach; None where there is none, so that nobody asks."""
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
    """By which of the two protocols an address is reached."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def answer_all(door: socket.socket, token: str) -> None:
    """Answer who waits outside, so many at once."""
    for _ in range(_AT_ONCE):
        try:
            said, caller = door.recvfrom(_LONGEST)
            if said == token.encode():
                door.sendto(answer(token), caller)
        except OSError:
            return  # nobody is there; or an answer cannot be sent, and nobody can be told


def answer(token: str) -> bytes:
    """What a warden says: that it has heard the token, and is no mere echo."""
    return token[::-1].encode()
