"""Ports for what has to know its own before it runs."""

import itertools
import os
import socket
from functools import cache

_FIRST, _SLICE, _SLICES = 10_000, 100, 50
"""Below those at which an agent's ranks meet, and below those that the kernel gives away."""
_next = itertools.count()


def free_port() -> int:
    """A port that nobody has, and that nobody else is given until it is bound.

    Each process that runs tests has a slice of its own, and goes through all of it.
    """
    low, _ = _own_slice()
    for number in itertools.islice(_next, _SLICE):
        port = low + number % _SLICE
        if _is_free(port):
            return port
    raise AssertionError(f"no port from {low} to {low + _SLICE - 1} is free")


@cache
def _own_slice() -> tuple[int, socket.socket]:
    """Its lowest port, and what holds it until this process ends: other runs of tests look, too."""
    for number in itertools.islice(itertools.count(os.getpid()), _SLICES):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0everstep-test-ports-{number % _SLICES}")
        except OSError:
            claim.close()
        else:
            return _FIRST + number % _SLICES * _SLICE, claim
    raise AssertionError(f"{_SLICES} processes run tests on this machine")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
