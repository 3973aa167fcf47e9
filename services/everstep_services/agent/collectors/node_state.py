"""The kernel's log since the round began, and the control groups of the ranks."""

import asyncio
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from everstep.clock import Clock
from everstep_services.agent.collectors.collection import EvidenceFound, NothingFoundError, Scene
from everstep_services.agent.probes.kernel import records
from everstep_services.agent.probes.kernel.rules import may_count
from everstep_services.agent.ranks.oom_kills import kill_counts

_BEFORE_S = 5.0
"""The clocks of the kernel's log and of this process may differ by this much."""
_LINES_MOST = 400
_LINE_MOST = 400
_MARK = re.compile(
    r"oom|Out of memory|Killed process|segfault|general protection|traps:|NVRM|nvidia|nvlink"
    r"|blocked for more than|soft lockup|hard LOCKUP|mlx\d|infiniband|ib_|EXT4-fs|XFS|nfs:"
    r"|I/O error|Machine check|Hardware Error|link (?:is )?down",
    re.IGNORECASE,
)
_GROUP_FILES = (
    "memory.events", "memory.current", "memory.max", "memory.peak", "memory.swap.current",
    "memory.pressure", "pids.current", "pids.max", "pids.events", "cpu.stat", "cpu.max",
    "cpu.pressure", "io.pressure",
    # version 1
    "memory.oom_control", "memory.failcnt", "memory.usage_in_bytes", "memory.limit_in_bytes",
    "memory.max_usage_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us",
)  # fmt: skip
_HOST_FILES = ("loadavg", "meminfo", "pressure/cpu", "pressure/memory", "pressure/io")
_FILE_BYTES = 4096
_GROUPS_MOST = 64


class NodeState:
    """Reads files of this node; `root` is another one in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    async def kernel_log(self, scene: Scene, clock: Clock) -> EvidenceFound | None:
        """The lines about hardware, memory and crashes; all others are left out."""
        del clock
        return await asyncio.to_thread(self._kernel_log, scene.began_s - _BEFORE_S)

    async def cgroup(self, scene: Scene, clock: Clock) -> EvidenceFound | None:
        """Memory, processes, processor time and pressure of the groups that ranks are in."""
        del clock
        return await asyncio.to_thread(self._cgroup, scene)

    def _kernel_log(self, since_s: float) -> EvidenceFound | None:
        try:
            reading = records.read(self._root / "dev/kmsg", -1)
        except FileNotFoundError:
            raise NothingFoundError("this kernel or container has no /dev/kmsg") from None
        except OSError as error:
            raise NothingFoundError(
                f"/dev/kmsg may not be read ({error.strerror}): give this user CAP_SYSLOG, or set "
                "kernel.dmesg_restrict=0"
            ) from error
        told = [
            f"[{record.at:12.6f}] {record.text[:_LINE_MOST]}"
            for record in reading.records
            if record.at >= since_s and (may_count(record.text) or _MARK.search(record.text))
        ][-_LINES_MOST:]
        if not told:
            return EvidenceFound("nothing about hardware, memory or crashes since the round began")
        more = f"{len(told)} lines, the last: " if len(told) > 1 else ""
        return EvidenceFound(
            more + told[-1].partition("] ")[2][:200], "\n".join(told).encode() + b"\n"
        )

    def _cgroup(self, scene: Scene) -> EvidenceFound | None:
        ranks: dict[int, str] = {}
        groups: dict[str, Mapping[str, str]] = {}
        living = [(rank.rank, str(rank.pid)) for rank in scene.ranks if rank.pid]
        for rank, pid in [*living, (-1, "self")]:
            paths = self._paths(pid)
            if rank >= 0:
                ranks[rank] = ", ".join(str(path) for path in paths)
            for path in paths:
                if str(path) not in groups and len(groups) < _GROUPS_MOST:
                    groups[str(path)] = _texts(path, _GROUP_FILES)
        counters = {path: files for path, files in groups.items() if files}
        host = _texts(self._root / "proc", _HOST_FILES)
        if not counters and not host:
            return None
        counts = kill_counts(root=self._root)
        document: dict[str, Any] = {
            "ranks": ranks,
            "groups": counters,
            "host": host,
            "killed_for_memory": {"group": counts.group, "host": counts.host},
            "shared_memory": _space(self._root / "dev/shm"),
        }
        return EvidenceFound(_memory_text(counters), msgspec.json.encode(document))

    def _paths(self, pid: str) -> list[Path]:
        """The folders of a process's groups; a container may see its own group as the root."""
        try:
            lines = (self._root / "proc" / pid / "cgroup").read_text().splitlines()
        except OSError:
            return []
        return list(dict.fromkeys(path for line in lines for path in self._folders(line)))

    def _folders(self, line: str) -> Iterator[Path]:
        controllers, _, group = line.partition(":")[2].partition(":")
        mount = self._root / "sys/fs/cgroup"
        if controllers:  # version 1
            wanted = {"memory", "cpu", "pids"} & set(controllers.split(","))
            mount = mount / (next(iter(sorted(wanted))) if wanted else "")
            if not wanted:
                return
        inside = PurePosixPath(group.lstrip("/"))
        if ".." in inside.parts:
            inside = PurePosixPath()
        for path in (mount / inside, mount):
            if path.is_dir():
                yield path
                return


def _space(folder: Path) -> Mapping[str, int] | None:
    try:
        about = os.statvfs(folder)
    except OSError:
        return None
    unit = about.f_frsize
    return {"size_bytes": unit * about.f_blocks, "free_bytes": unit * about.f_bavail}


def _texts(folder: Path, names: tuple[str, ...]) -> Mapping[str, str]:
    texts = {}
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                texts[name] = file.read(_FILE_BYTES).decode(errors="replace").strip()
        except OSError:
            continue
    return texts


def _memory_text(groups: Mapping[str, Mapping[str, str]]) -> str:
    """The group with the least memory left, and whether a process in it was killed."""
    parts = []
    for path, files in groups.items():
        used = files.get("memory.current") or files.get("memory.usage_in_bytes")
        limit = files.get("memory.max") or files.get("memory.limit_in_bytes") or "max"
        events = files.get("memory.events") or files.get("memory.oom_control") or ""
        killed = next((line for line in events.splitlines() if line.startswith("oom_kill ")), "")
        number = killed.partition(" ")[2]
        if number not in {"", "0"}:
            parts.append(f"{number} killed for lack of memory in {path}")
        if used and used.isdecimal() and limit.isdecimal() and int(limit) < 1 << 60:
            share = 100 * int(used) / max(int(limit), 1)
            parts.append(f"{share:.0f} % of {int(limit) >> 20} MiB used in {path}")
    return "; ".join(parts[:4]) or "no memory limit, and no process was killed for lack of memory"
