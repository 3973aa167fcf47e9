"""Limits and load: the resources that processes may take here, and the present load."""

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import CheckState, Look
from everstep_services.agent.probes.host.common import result, worst

_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of ranks that are started from here; -1 for no limit."""

    open_files: int
    processes: int
    locked_bytes: int


def own_limits() -> ProcessLimits:
    """The limits of this process, which its children inherit."""
    return ProcessLimits(
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )


def limits(look: Look, ask: Callable[[], ProcessLimits] = own_limits) -> Iterator[CheckResult]:
    """Whether limits are wide enough for ranks, their data workers and network adapters."""
    own, settings = ask(), look.settings
    troubles: list[tuple[CheckState, str]] = []
    for resource_name, value, least, option in (
        ("open files", own.open_files, settings.open_files_least, "-n"),
        ("processes", own.processes, settings.processes_least, "-u"),
    ):
        if value != _UNLIMITED and value < least:
            fix = f"ulimit {option} {max(least, 65536)}, or limits.conf"
            troubles.append(("warning", f"only {value} {resource_name} (least {least}); {fix}"))
    has_adapters = look.path("sys/class/infiniband").is_dir()
    if has_adapters and own.locked_bytes != _UNLIMITED:
        reason = f"only {own.locked_bytes >> 10} KiB may be locked, and adapters lock memory"
        troubles.append(("warning", f"{reason}; ulimit -l unlimited, or limits.conf"))
    yield worst("limits", troubles)


def load(look: Look) -> Iterator[CheckResult]:
    """The number of processes that want to run, or wait for disks, over five minutes."""
    value = float(look.path("proc/loadavg").read_text().split()[1])
    cpus = os.cpu_count() or 1
    limit = look.settings.load_per_cpu * cpus
    if value <= limit:
        yield result("load")
        return
    reason = f"load {value:g} on {cpus} processors (limit {limit:g}); see what runs: top"
    yield result("load", "warning", reason, "watch")


def zombies(look: Look) -> Iterator[CheckResult]:
    """Zombies: processes that have exited, and that no parent has reaped."""
    count, limit = 0, look.settings.zombies_limit
    for name in os.listdir(look.path("proc")):
        if name.isdecimal() and _is_zombie(look, name):
            count += 1
    if count <= limit:
        yield result("zombies")
        return
    reason = (
        f"{count} zombies, which their parents have not reaped (limit {limit}); end their parents"
    )
    yield result("zombies", "warning", reason, "watch")


def _is_zombie(look: Look, pid: str) -> bool:
    try:
        line = look.path("proc", pid, "stat").read_bytes()
    except OSError:  # gone meanwhile
        return False
    return line.rpartition(b")")[2].lstrip().startswith(b"Z")
