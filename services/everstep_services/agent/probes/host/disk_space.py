"""Disk space in `/dev/shm`, `/tmp`, and wherever this node must write."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import CheckState, Look
from everstep_services.agent.probes.host.common import MIB, result, worst
from everstep_services.agent.probes.settings import ChecksSettings

_SHM = "dev/shm"


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The space of a file system."""

    size: int
    free: int
    files: int
    """The number of files that it can hold; 0 where there is no such limit."""
    files_free: int
    is_read_only: bool = False


def measure(path: Path) -> DiskSpace:
    """Ask the file system."""
    about = os.statvfs(path)
    return DiskSpace(
        size=about.f_blocks * about.f_frsize,
        free=about.f_bavail * about.f_frsize,
        files=about.f_files,
        files_free=about.f_favail,
        is_read_only=bool(about.f_flag & os.ST_RDONLY),
    )


def shared_memory(look: Look, ask: Callable[[Path], DiskSpace] = measure) -> Iterator[CheckResult]:
    """Whether ranks can share memory with their data workers, and NCCL its buffers."""
    path = look.path(_SHM)
    if not path.is_dir():
        reason = "it is not there; mount a tmpfs on it"
        yield result("shared memory", "warning", reason, "report")
        return
    room, settings = ask(path), look.settings
    troubles = judge(room, settings)
    if room.size < settings.shm_least_mib * MIB:
        reason = f"it has only {room.size // MIB} MiB (least {settings.shm_least_mib} MiB)"
        troubles.append(("warning", f"{reason}; in a container: --shm-size=16g, or ipc: host"))
    yield worst("shared memory", troubles)


def folders(look: Look, ask: Callable[[Path], DiskSpace] = measure) -> Iterator[CheckResult]:
    """Whether each watched folder has space; folders on one disk are measured separately."""
    wanted = dict.fromkeys([Path("/tmp"), *look.settings.room_paths])  # noqa: S108  only measured
    for path in wanted:
        try:
            yield worst(str(path), judge(ask(_nearest(look.path(str(path)))), look.settings))
        except OSError as error:
            yield result(str(path), "unknown", f"cannot be measured: {error.strerror}")


def judge(room: DiskSpace, settings: ChecksSettings) -> list[tuple[CheckState, str]]:
    """The troubles of a file system, as (state, reason)."""
    troubles: list[tuple[CheckState, str]] = []
    if room.is_read_only:
        troubles.append(("warning", "it is read-only; remount it, or write elsewhere"))
    free_mib = room.free // MIB
    limits: tuple[tuple[CheckState, int], ...] = (
        ("failed", settings.room_failed_mib),
        ("warning", settings.room_least_mib),
    )
    for state, least_mib in limits:
        if free_mib < least_mib and room.size > least_mib * MIB:
            reason = f"{free_mib} MiB are free (least {least_mib} MiB); delete something there"
            troubles.append((state, reason))
            break
    least = settings.inodes_least_percent
    if room.files and 100 * room.files_free / room.files < least:
        reason = f"{room.files_free} more files fit of {room.files} (least {least:g} %)"
        troubles.append(("warning", f"{reason}; delete small files there"))
    return troubles


def _nearest(path: Path) -> Path:
    """The folder, or the parent in which it would be made."""
    while not path.exists():
        path = path.parent
    return path
