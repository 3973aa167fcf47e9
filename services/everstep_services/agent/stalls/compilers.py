"""Whether a compilation computes: the processor time of a rank and of its descendants."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.clock import Clock
from everstep_services.agent.stalls.process_state import PROC

_BUSY_RATIO = 0.02
"""Of one core: idle threads that poll for work use less."""
_GAP_S = 15.0
"""After a longer gap between looks, nothing is known about the time between."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Compiling:
    """A rank that compiles for longer than is usual at its position."""

    pid: int
    window_s: float
    """It has hung if it computes next to nothing for this long."""


@dataclass(slots=True)
class _Since:
    """The usage when it was last seen to compute."""

    pid: int
    at: float
    cpu_s: float
    seen_s: float
    """The usage at the last look."""
    looked_s: float


class Compilers:
    """Looks every few seconds, and only while a rank compiles for longer than is usual."""

    def __init__(self, clock: Clock, proc: Path = PROC) -> None:
        self._clock = clock
        self._proc = proc
        self._since: dict[int, _Since] = {}

    def begins(self) -> None:
        """A new round: other processes."""
        self._since.clear()

    def idle_s(self, rank: int) -> float:
        """For how long it has computed next to nothing, as far as that was witnessed."""
        earlier = self._since.get(rank)
        return 0.0 if earlier is None else earlier.looked_s - earlier.at

    def look(self, ranks: Mapping[int, Compiling]) -> None:
        """Look at these ranks, and forget all others."""
        self._since = {rank: usage for rank, usage in self._since.items() if rank in ranks}
        if not ranks:
            return
        used_s, now = self._used_s([rank.pid for rank in ranks.values()]), self._clock.now()
        for rank, usage in ranks.items():
            cpu_s, earlier = used_s[usage.pid], self._since.get(rank)
            if earlier is None or _has_computed(earlier, usage, cpu_s, now):
                self._since[rank] = _Since(usage.pid, now, cpu_s, cpu_s, now)
            else:
                earlier.seen_s, earlier.looked_s = cpu_s, now

    def overlook(self) -> None:
        """Discount the usage since the look: our questions have caused it."""
        used_s = self._used_s([since.pid for since in self._since.values()])
        for since in self._since.values():
            more_s = max(0.0, used_s[since.pid] - since.seen_s)
            since.cpu_s, since.seen_s = since.cpu_s + more_s, since.seen_s + more_s

    def _used_s(self, pids: list[int]) -> dict[int, float]:
        """The usage of each, with all its descendants."""
        if not pids:
            return {}
        own_s, children = dict[int, float](), dict[int, list[int]]()
        for name in os.listdir(self._proc):
            stat = self._stat(name) if name.isdecimal() else None
            if stat is not None:
                parent, own_s[int(name)] = stat
                children.setdefault(parent, []).append(int(name))
        return {pid: _sum_s(pid, own_s, children) for pid in pids}

    def _stat(self, pid: str) -> tuple[int, float] | None:
        """Its parent, and its processor time with that of the children it has reaped."""
        try:
            fields = (self._proc / pid / "stat").read_text().rpartition(")")[2].split()
            return int(fields[1]), sum(map(int, fields[11:15])) * _TICK_S
        except (OSError, ValueError, IndexError):
            return None  # it has just ended


def _has_computed(earlier: _Since, usage: Compiling, cpu_s: float, now: float) -> bool:
    if earlier.pid != usage.pid or now - earlier.looked_s > _GAP_S or cpu_s < earlier.seen_s:
        return True  # as far as is known: a child that is gone has taken its usage along
    return cpu_s - earlier.cpu_s >= _BUSY_RATIO * usage.window_s


def _sum_s(pid: int, own_s: Mapping[int, float], children: Mapping[int, list[int]]) -> float:
    below, total_s = {pid}, 0.0
    open_ = [pid]
    while open_:
        usage = open_.pop()
        total_s += own_s.get(usage, 0.0)
        # process ids may be reused during the reading: at worst this finds a circle
        new = set(children.get(usage, ())) - below
        below |= new
        open_ += new
    return total_s
