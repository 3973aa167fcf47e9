"""Ports that an agent keeps free, for the ranks to meet at should it get slot 0."""

import errno
import random
import socket
from pathlib import Path

from everstep.errors import EverstepError

_RANGE = (15_000, 32_000)
_ATTEMPTS = 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class NoPortError(EverstepError):
    """No port is free in the range where ranks may meet."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__(
            f"no TCP port from {low} to {high} was free in {_ATTEMPTS} attempts: "
            f"find out what holds them with `ss -ltnp`"
        )


class Reserved:
    """One port, bound so that no other process takes it; free it just before it is used."""

    def __init__(self) -> None:
        low, high = _range()
        for _ in range(_ATTEMPTS):
            # Below the kernel's own range: an outgoing connection never takes it.
            self.port = random.randrange(low, high)  # noqa: S311  no secret
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                self._socket.bind(("", self.port))
            except OSError as error:
                self._socket.close()
                if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                    raise
            else:
                return
        raise NoPortError(low, high)

    def free(self) -> None:
        """Let others bind it. Safe to repeat."""
        self._socket.close()


def _range() -> tuple[int, int]:
    low, high = _RANGE
    try:
        ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return low, high
    return (low, min(high, ephemeral)) if ephemeral > low + _ATTEMPTS else (low, high)
