"""Memory: what is available, the pressure, kills for lack of memory, and errors."""

from collections.abc import Iterator
from pathlib import Path

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import CheckState, Look
from everstep_services.agent.probes.host.common import grown, result, worst

_CORRECTED_MOST = 100


def available(look: Look) -> Iterator[CheckResult]:
    """The memory that may still be taken."""
    table = dict(_pairs(look.path("proc/meminfo"), ":"))
    total, free = (int(table[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    percent, least = 100 * free / total, look.settings.memory_least_percent
    if percent >= least:
        yield result("memory")
        return
    reason = f"{free >> 10} MiB are available, {percent:.1f} % (least {least:g} %)"
    yield result("memory", "warning", f"{reason}; see what holds it: ps --sort=-rss", "watch")


def pressure(look: Look) -> Iterator[CheckResult]:
    """How long processes have waited for memory within the last minute."""
    waits: dict[str, float] = {}
    for line in look.path("proc/pressure/memory").read_text().splitlines():
        kind, *rest = line.split()
        waits[kind] = float(dict(part.split("=") for part in rest)["avg60"])
    limit = look.settings.memory_pressure_percent
    if waits["full"] <= limit:
        yield result("memory pressure")
        return
    reason = (
        f"all processes waited for memory for {waits['full']:g} % of a minute (limit {limit:g} %)"
        f", some for {waits['some']:g} %; start fewer data workers, or give the job more memory"
    )
    yield result("memory pressure", "warning", reason, "watch")


def kills(look: Look) -> Iterator[CheckResult]:
    """The processes that the kernel has killed for their memory."""
    sources = {"on this host": look.path("proc/vmstat"), "in this control group": _own_events(look)}
    troubles: list[tuple[CheckState, str]] = []
    for where, path in sources.items():
        if path is None:
            continue
        more = grown(look, f"oom_kill {where}", int(dict(_pairs(path))["oom_kill"]))
        if more:
            troubles.append(("warning", f"{more} killed for lack of memory {where}"))
    if troubles:
        troubles.append(("warning", "since the last look; dmesg says which: lower their memory"))
    yield worst("memory kills", troubles)


def errors(look: Look) -> Iterator[CheckResult]:
    """The errors that the memory controllers have counted."""
    controllers = sorted(look.path("sys/devices/system/edac/mc").glob("mc[0-9]*"))
    if not controllers:
        yield result("memory errors", "unsupported", "this host does not count them")
    for folder in controllers:
        uncorrected, corrected = (
            int((folder / name).read_text()) for name in ("ue_count", "ce_count")
        )
        more = grown(look, f"{folder.name} ue", uncorrected)
        more_corrected = grown(look, f"{folder.name} ce", corrected)
        name = f"memory errors {folder.name}"
        if more:
            reason = f"{more} uncorrected errors since the last look; replace the memory module"
            yield result(name, "failed", reason, "replace")
        elif more is None and uncorrected:
            reason = f"{uncorrected} uncorrected errors since the start; see the kernel's log"
            yield result(name, "warning", reason, "replace")
        elif more_corrected and more_corrected > _CORRECTED_MOST:
            reason = (
                f"{more_corrected} corrected errors since the last look (limit {_CORRECTED_MOST})"
            )
            yield result(name, "warning", f"{reason}; a module may be about to fail", "watch")
        else:
            yield result(name)


def _pairs(path: Path, separator: str | None = None) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines():
        name, *rest = line.split(separator, 1)
        if rest:
            yield name.strip(), rest[0]


def _own_events(look: Look) -> Path | None:
    """The counter of our own control group, if it is version 2."""
    try:
        lines = look.path("proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return None
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    path = None if own is None else look.path("sys/fs/cgroup", own, "memory.events")
    return path if path is not None and path.exists() else None
