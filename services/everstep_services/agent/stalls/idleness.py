"""Which processes are idle: they use no processor time and move no bytes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.clock import Clock

_BUSY_RATIO = 0.005
"""Threads that only poll for work use less than this."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class _Since:
    """The usage of a process when it was last seen to work."""

    pid: int
    at: float
    cpu_s: float
    moved_bytes: int
    seen: tuple[float, int]
    """The usage at the last look."""


class Idleness:
    """Call `look` about once a second while somebody wants to know."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[int, _Since] = {}

    def look(self, pids: Mapping[int, int]) -> dict[int, float]:
        """The seconds for which each rank's process has been idle, since it was first asked for."""
        now, idle_s = self._clock.now(), dict[int, float]()
        for gone in self._since.keys() - pids.keys():
            del self._since[gone]
        for rank, pid in pids.items():
            used = _used(pid)
            if used is None:
                self._since.pop(rank, None)
                continue
            earlier = self._since.get(rank)
            if earlier is None or earlier.pid != pid or _has_worked(earlier, now, *used):
                self._since[rank] = earlier = _Since(pid, now, *used, used)
            earlier.seen = used
            idle_s[rank] = now - earlier.at
        return idle_s

    def overlook(self, rank: int) -> None:
        """Discount the usage since the last look: our own question has caused it."""
        earlier = self._since.get(rank)
        used = None if earlier is None else _used(earlier.pid)
        if earlier is not None and used is not None:
            (cpu_s, moved_bytes), (seen_s, seen_bytes) = used, earlier.seen
            earlier.cpu_s += cpu_s - seen_s
            earlier.moved_bytes += moved_bytes - seen_bytes


def _has_worked(earlier: _Since, now: float, cpu_s: float, moved_bytes: int) -> bool:
    allowed_s = max(2 * _TICK_S, (now - earlier.at) * _BUSY_RATIO)
    return moved_bytes != earlier.moved_bytes or cpu_s - earlier.cpu_s > allowed_s


def _used(pid: int) -> tuple[float, int] | None:
    """Processor seconds and bytes of a process; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    except (OSError, ValueError, IndexError):
        return None
    return cpu_s, _moved(pid)


def _moved(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0  # hardened kernels show it to root only
    counts = dict(line.split(": ", 1) for line in lines)
    return int(counts.get("rchar", 0)) + int(counts.get("wchar", 0))
