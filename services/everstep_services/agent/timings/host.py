"""Counters of the operating system and of drivers, for ranks and their host, over a window."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from everstep.messages import DeviceUse, HostUse
from everstep_services.agent.probes.gpu.nvml import (
    GpuGoneError,
    Load,
    Nvml,
    NvmlAwayError,
    load,
    opened,
)
from everstep_services.agent.ranks.device_memory import has_devices
from everstep_services.agent.timings.connections import TcpConnection

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_MOST_THREADS = 64
_MOST_PROCESSES = 10_000
_LOOK_EVERY = 8
"""Windows."""
_MOST_DEVICES = 32
_MOST_COUNTERS = 64
_RESOURCES = ("cpu", "memory", "io")
_LINK_COUNTERS = (
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "rx_crc_errors",
    "rx_missed_errors",
    "rx_fifo_errors",
    "tx_carrier_errors",
    "collisions",
)

_BUSY_RATIO = 0.1
"""Connections with this share of the busiest one's bytes count for round trips."""


@dataclass(frozen=True, slots=True)
class System:
    """The files and calls through which the kernel is asked."""

    proc: Path = Path("/proc")
    groups: Path = Path("/sys/fs/cgroup")
    devices: Path = Path("/sys/class/net")


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """The counters of one rank at one moment. None where the kernel does not show them."""

    cpu_s: float | None = None
    main_cpu_s: float | None = None
    runnable_s: float | None = None
    switches: int | None = None
    major_faults: int | None = None
    pressure_s: Mapping[str, float] = field(default_factory=dict)
    throttled_s: float | None = None
    workers_cpu_s: Mapping[int, float] = field(default_factory=dict)
    """The processor time of each process that it has started, by process id."""
    connections: Mapping[int, TcpConnection] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostReading:
    """The counters of the whole host."""

    steal_s: float | None = None
    links: Mapping[str, int] = field(default_factory=dict)


def use_between(before: ProcessReading, after: ProcessReading) -> HostUse:
    """The usage of a rank between two readings."""
    pressure = {
        name: _less(after.pressure_s.get(name), before.pressure_s.get(name)) for name in _RESOURCES
    }
    workers = after.workers_cpu_s
    has_connections = bool(after.connections)
    return HostUse(
        cpu_s=_less(after.cpu_s, before.cpu_s),
        main_cpu_s=_less(after.main_cpu_s, before.main_cpu_s),
        runnable_s=_less(after.runnable_s, before.runnable_s),
        involuntary_switches=_fewer(after.switches, before.switches),
        major_faults=_fewer(after.major_faults, before.major_faults),
        cpu_pressure_s=pressure["cpu"],
        memory_pressure_s=pressure["memory"],
        io_pressure_s=pressure["io"],
        throttled_s=_less(after.throttled_s, before.throttled_s),
        workers=len(workers),
        workers_cpu_s=_workers_cpu_s(before.workers_cpu_s, workers) if workers else None,
        retransmits=_retransmits(before, after) if has_connections else None,
        round_trip_s=_round_trip_s(before, after),
        unsent_bytes=sum(connection.unsent_bytes for connection in after.connections.values())
        if has_connections
        else None,
    )


def link_errors(before: HostReading, after: HostReading) -> tuple[tuple[str, int], ...]:
    """The growth of network devices' error counters, where it is not zero."""
    grown = (
        (name, count - before.links[name])
        for name, count in sorted(after.links.items())
        if count > before.links.get(name, count)
    )
    return tuple(grown)[:_MOST_COUNTERS]


def steal_between(before: HostReading, after: HostReading) -> float | None:
    """The processor time that the hypervisor gave to others meanwhile."""
    return _less(after.steal_s, before.steal_s)


def read_process(
    pid: int, workers: Mapping[int, float], connections: Mapping[int, TcpConnection], system: System
) -> ProcessReading:
    """The counters of a rank now; missing ones stay None."""
    root = system.proc / str(pid)
    stat, main = _stat(root / "stat"), _stat(root / "task" / str(pid) / "stat")
    groups = _groups(root / "cgroup")
    return ProcessReading(
        cpu_s=_cpu_s(stat),
        main_cpu_s=_cpu_s(main),
        runnable_s=_runnable_s(root / "task" / str(pid) / "schedstat"),
        switches=_switches(root / "task"),
        major_faults=None if stat is None else int(stat[9]),
        pressure_s=dict(_pressures(groups, system)),
        throttled_s=_throttled_s(groups, system),
        workers_cpu_s=workers,
        connections=connections,
    )


def read_host(system: System) -> HostReading:
    """The counters of the host now."""
    return HostReading(_steal_s(system.proc / "stat"), dict(_links(system.devices)))


class Workers:
    """The processes that ranks have started; looked up seldom if that reads all of /proc."""

    def __init__(self) -> None:
        self._looks = 0
        self._known: dict[int, frozenset[int]] = {}

    def cpu_s(self, pids: frozenset[int], system: System) -> dict[int, dict[int, float]]:
        """For each process, the processor time of those that it has started, by process id."""
        listed = {pid: _listed(system.proc / str(pid) / "task") for pid in pids}
        if any(children is None for children in listed.values()):
            if self._looks % _LOOK_EVERY == 0 or self._known.keys() != pids:
                self._known = _searched(pids, system)
            self._looks += 1
            listed = {pid: self._known.get(pid, frozenset()) for pid in pids}
        return {
            pid: {
                child: cpu_s
                for child in sorted(children or ())
                if (cpu_s := _child_cpu_s(child, pid, system)) is not None
            }
            for pid, children in listed.items()
        }


def _listed(tasks: Path) -> frozenset[int] | None:
    """The sum over its threads; None where the kernel keeps no such list."""
    try:
        threads = os.listdir(tasks)[:_MOST_THREADS]
    except OSError:
        return frozenset()
    pids: set[int] = set()
    for thread in threads:
        try:
            words = (tasks / thread / "children").read_text().split()
        except FileNotFoundError:
            if (tasks / thread).exists():
                return None
            continue  # the thread has just ended
        except OSError:
            continue
        pids.update(int(word) for word in words if word.isdecimal())
    return frozenset(pids)


def _searched(pids: frozenset[int], system: System) -> dict[int, frozenset[int]]:
    threads: dict[int, set[int]] = {pid: set() for pid in pids}
    try:
        names = [name for name in os.listdir(system.proc) if name.isdecimal()]
    except OSError:
        names = []
    for name in names[:_MOST_PROCESSES]:
        parent = _parent(_stat(system.proc / name / "stat"))
        if parent in threads:
            threads[parent].add(int(name))
    return {pid: frozenset(children) for pid, children in threads.items()}


def _child_cpu_s(pid: int, parent: int, system: System) -> float | None:
    stat = _stat(system.proc / str(pid) / "stat")
    return (
        _cpu_s(stat) if _parent(stat) == parent else None
    )  # the number may belong to another process by now


def _parent(stat: list[str] | None) -> int:
    return int(stat[1]) if stat is not None and stat[1].isdecimal() else 0


def _stat(path: Path) -> list[str] | None:
    """The fields after the name of the command."""
    fields = _text(path).rpartition(")")[2].split()
    return fields if len(fields) > 13 and all(field.isdecimal() for field in fields[9:13]) else None


def _cpu_s(stat: list[str] | None) -> float | None:
    return None if stat is None else (int(stat[11]) + int(stat[12])) * _TICK_S


def _runnable_s(path: Path) -> float | None:
    words = _text(path).split()
    return int(words[1]) / 1e9 if len(words) > 1 and words[1].isdecimal() else None


def _switches(tasks: Path) -> int | None:
    try:
        threads = sorted(os.listdir(tasks), key=len)[:_MOST_THREADS]
    except OSError:
        return None
    counts = [
        _after(_text(tasks / thread / "status"), "nonvoluntary_ctxt_switches:")
        for thread in threads
    ]
    readable = [count for count in counts if count is not None]
    return sum(readable) if readable else None


def _groups(path: Path) -> dict[str, str]:
    """The path of each cgroup by its controllers; that of version 2 has none."""
    lines = (line.split(":", 2) for line in _text(path).splitlines())
    return {
        name: parts[2].lstrip("/")
        for parts in lines
        if len(parts) == 3
        for name in parts[1].split(",")
    }


def _pressures(groups: Mapping[str, str], system: System) -> Iterator[tuple[str, float]]:
    """Version 2 has it for each group; otherwise it is that of the whole host."""
    folder = system.groups / groups.get("", "")
    for name in _RESOURCES:
        text = _text(folder / f"{name}.pressure") or _text(system.proc / "pressure" / name)
        _, _, total = text.partition("\n")[0].partition("total=")
        if text.startswith("some") and total.isdecimal():
            yield name, int(total) / 1e6


def _throttled_s(groups: Mapping[str, str], system: System) -> float | None:
    us = _after(_text(system.groups / groups.get("", "") / "cpu.stat"), "throttled_usec")
    if us is not None:
        return us / 1e6
    if "cpu" not in groups:
        return None
    ns = _after(_text(system.groups / "cpu" / groups["cpu"] / "cpu.stat"), "throttled_time")
    return None if ns is None else ns / 1e9


def _steal_s(path: Path) -> float | None:
    words = _text(path).partition("\n")[0].split()
    return int(words[8]) * _TICK_S if len(words) > 8 and words[8].isdecimal() else None


def _links(devices: Path) -> Iterator[tuple[str, int]]:
    try:
        names = sorted(os.listdir(devices))
    except OSError:
        return
    for device in [name for name in names if name != "lo"][:_MOST_DEVICES]:
        for counter in _LINK_COUNTERS:
            text = _text(devices / device / "statistics" / counter).strip()
            if text.isdecimal():
                yield f"{device} {counter}", int(text)


def _workers_cpu_s(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """The sum for processes that live; new ones have used all of it since."""
    return round(sum(max(0.0, cpu_s - before.get(pid, 0.0)) for pid, cpu_s in after.items()), 6)


def _retransmits(before: ProcessReading, after: ProcessReading) -> int:
    earlier = before.connections
    return sum(
        max(0, connection.retransmits - (earlier[inode].retransmits if inode in earlier else 0))
        for inode, connection in after.connections.items()
    )


def _round_trip_s(before: ProcessReading, after: ProcessReading) -> float | None:
    """The median of the busiest connections: figures of idle ones are old."""
    earlier = before.connections
    sent = {
        connection: connection.sent_bytes - (earlier[inode].sent_bytes if inode in earlier else 0)
        for inode, connection in after.connections.items()
    }
    most = max(sent.values(), default=0)
    if most <= 0:
        return None
    busy = [
        connection.round_trip_s for connection, count in sent.items() if count >= _BUSY_RATIO * most
    ]
    return round(median(busy), 6)


def _after(text: str, name: str) -> int | None:
    for line in text.splitlines():
        if line.startswith(name):
            word = line[len(name) :].strip()
            return int(word) if word.isdecimal() else None
    return None


def _less(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else round(max(0.0, after - before), 6)


def _fewer(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else max(0, after - before)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


_HELD_DOWN_BY = (
    ("nvmlClocksEventReasonSwPowerCap", "sw_power_cap"),
    ("nvmlClocksEventReasonHwSlowdown", "hw_slowdown"),
    ("nvmlClocksEventReasonSyncBoost", "sync_boost"),
    ("nvmlClocksEventReasonSwThermalSlowdown", "sw_thermal_slowdown"),
    ("nvmlClocksEventReasonHwThermalSlowdown", "hw_thermal_slowdown"),
    ("nvmlClocksEventReasonHwPowerBrakeSlowdown", "hw_power_brake_slowdown"),
    ("nvmlClocksEventReasonDisplayClockSetting", "display_clock_setting"),
)


def device_uses(
    pids: Collection[int], library: Load = load, *, has_driver: bool | None = None
) -> dict[int, DeviceUse]:
    """For each of these processes, the use of the accelerator on which it computes."""
    if not (has_devices() if has_driver is None else has_driver):
        return {}
    uses: dict[int, DeviceUse] = {}
    try:
        with opened(library) as nvml:
            for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
                gpu = nvml.ask("nvmlDeviceGetHandleByIndex", index)
                holders = nvml.ask("nvmlDeviceGetComputeRunningProcesses_v3", gpu) or ()
                own = {process.pid for process in holders} & set(pids)
                if own:
                    uses |= dict.fromkeys(own, _use(nvml, gpu))
    except (NvmlAwayError, GpuGoneError):
        return uses  # the checks report the reason
    return uses


def _use(nvml: Nvml, gpu: Any) -> DeviceUse:
    clock = nvml.number("NVML_CLOCK_SM")
    milliwatts = nvml.ask("nvmlDeviceGetPowerUsage", gpu)
    heat = nvml.ask("nvmlDeviceGetTemperature", gpu, nvml.number("NVML_TEMPERATURE_GPU"))
    reasons = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", gpu) or 0
    return DeviceUse(
        clock_mhz=nvml.ask("nvmlDeviceGetClockInfo", gpu, clock),
        clock_most_mhz=nvml.ask("nvmlDeviceGetMaxClockInfo", gpu, clock),
        power_watts=None if milliwatts is None else milliwatts / 1e3,
        temperature_celsius=None if heat is None else float(heat),
        throttled_by=tuple(word for name, word in _HELD_DOWN_BY if reasons & nvml.number(name)),
    )
