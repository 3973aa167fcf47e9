"""Whether the kernel has killed a rank for lack of memory, read from its counters."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from everstep_services.agent.core.exit import MemoryKill

_LOOK_EVERY_S = 60.0
"""Kills from before twice this time have nothing to do with a rank that ends now."""


@dataclass(frozen=True, slots=True)
class KillCounts:
    """The number of processes that the kernel has killed for memory so far."""

    group: int | None = None
    """In the ranks' own control group and those below it; None if nothing counts there."""
    host: int | None = None
    counted_by: str = ""
    """The file from which `group` was read."""


def blame(before: KillCounts, now: KillCounts) -> MemoryKill:
    """Whose memory a SIGKILL between these two moments may be about.

    The group's own count decides, even if it has not grown: other kills on the host are then no
    concern of the rank.
    """
    if before.group is not None and now.group is not None and before.counted_by == now.counted_by:
        return "rank" if now.group > before.group else ""
    if before.host is not None and now.host is not None and now.host > before.host:
        return "host"
    return ""


def kill_counts(pid: int | None = None, root: Path = Path("/")) -> KillCounts:
    """The counts now, for the control group of a process; ours by default. Blocks."""
    host = _number(root / "proc/vmstat", "oom_kill")
    cgroups = root / "proc" / ("self" if pid is None else str(pid)) / "cgroup"
    for path in _counters(cgroups, root / "sys/fs/cgroup"):
        killed = _number(path, "oom_kill")
        if killed is not None:
            # where groups die as a whole, `oom_kill` counts processes, the other number groups
            return KillCounts(killed + (_number(path, "oom_group_kill") or 0), host, str(path))
    return KillCounts(None, host)


class MemoryKills:
    """The counts of one agent's ranks, and those of a while ago."""

    def __init__(self, count: Callable[[], KillCounts] = kill_counts) -> None:
        self._count = count
        self._older = self._newer = KillCounts()
        self._at = 0.0

    async def begin(self, now: float) -> None:
        """Ranks are about to be started: earlier kills are not theirs."""
        self._older = self._newer = await asyncio.to_thread(self._count)
        self._at = now

    async def look(self, now: float) -> None:
        """Forget kills of long ago; cheap to call often."""
        if now - self._at >= _LOOK_EVERY_S:
            self._at = now
            self._older, self._newer = self._newer, await asyncio.to_thread(self._count)

    async def blame(self) -> MemoryKill:
        """Whose memory a SIGKILL just now may be about: the kernel counts before it kills."""
        return blame(self._older, await asyncio.to_thread(self._count))


def _counters(cgroups: Path, mount: Path) -> Iterator[Path]:
    """Files that may count for a process, the nearest group's first.

    A container may see its own group as the mount's root, whatever path /proc names; then the
    nearest existing group is its own.
    """
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return
    for line in sorted(lines, key=lambda line: line.startswith("0::")):  # version 1 has the memory
        controllers, _, path = line.partition(":")[2].partition(":")
        if "memory" in controllers.split(","):
            yield from _upwards(mount / "memory", path, "memory.oom_control")
        elif line.startswith("0::"):
            yield from _upwards(mount, path, "memory.events")


def _upwards(base: Path, path: str, name: str) -> Iterator[Path]:
    group = PurePosixPath(path.lstrip("/"))
    if ".." in group.parts:  # outside the part that this process may see
        group = PurePosixPath()
    for group_path in (group, *group.parents):
        yield base / group_path / name


def _number(path: Path, name: str) -> int | None:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == name), None)
    except (OSError, ValueError):
        return None
