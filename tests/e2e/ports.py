"""Ports for what has to know its own before it runs."""

import itertools
import os
import socket

_FIRST, _SLICE, _SLICES = 10_000, 500, 10
"""Below those at which an agent's ranks meet, and below those that the kernel gives away."""
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_next = itertools.count(os.getpid())  # two runs of the tests do not begin at the same one


def free_port() -> int:
    """A port that nobody has, and that nobody else is given until it is bound.

    Each worker that runs tests has a slice of its own, and goes through all of it.
    """
    low = _FIRST + _WORKER % _SLICES * _SLICE
    for number in itertools.islice(_next, _SLICE):
        port = low + number % _SLICE
        if _is_free(port):
            return port
    raise AssertionError(f"no port from {low} to {low + _SLICE - 1} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
