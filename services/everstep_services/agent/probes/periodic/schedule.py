"""When each probe runs: its interval, its jitter, and its share of a core. Pure."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from everstep_services.agent.probes.settings import ProbeSettings

_JITTER = 0.1
"""An interval is longer or shorter by at most this part."""


@dataclass(slots=True)
class _Probe:
    settings: ProbeSettings
    next_at: float
    runs: int = 0
    cpu_s: float = 0.0
    is_running: bool = False
    started_at: float = 0.0


class ProbeSchedule:
    """Chooses the probes that are due.

    Each probe has an equal part of the share. After a run that took `cpu_s`, the probe waits until
    its part has paid for the run, so all probes together never take more than the share, except
    for one run of each.
    """

    def __init__(
        self, probes: Mapping[str, ProbeSettings], share: float, seed: str, now: float
    ) -> None:
        self._seed = seed
        self._part = share / max(len(probes), 1)
        self._began = now
        self._start_cpu_s = 0.0
        # The first runs are spread over an interval, so nodes do not probe at the same moment.
        self._probes = {
            name: _Probe(settings, now + settings.every_s * self._fraction(name, 0))
            for name, settings in probes.items()
        }

    def due(self, now: float, free: int) -> list[str]:
        """At most `free` probes that must start now, the longest overdue first."""
        waiting = [
            (probe.next_at, name)
            for name, probe in self._probes.items()
            if not probe.is_running and probe.next_at <= now
        ]
        return [name for _, name in sorted(waiting)[:free]]

    def workers_started(self, cpu_s: float) -> None:
        """Count the start of a process that all probes use."""
        self._start_cpu_s += cpu_s

    def started(self, name: str, now: float) -> None:
        """A run has begun."""
        probe = self._probes[name]
        probe.is_running, probe.started_at = True, now

    def ended(self, name: str, now: float, cpu_s: float) -> float | None:
        """A run has ended; return the interval where the run was too costly for the usual one."""
        probe = self._probes[name]
        probe.is_running = False
        probe.runs += 1
        probe.cpu_s += cpu_s
        every_s = probe.settings.every_s
        jitter = 1 + _JITTER * (2 * self._fraction(name, probe.runs) - 1)
        paid_s = cpu_s / self._part
        # The end of a run that took longer than the interval is not followed by another at once.
        probe.next_at = max(probe.started_at + max(every_s * jitter, paid_s), now)
        return paid_s if paid_s > every_s * (1 + _JITTER) else None

    @property
    def wake_at(self) -> float | None:
        """When the next probe is due; None while all run."""
        times = (probe.next_at for probe in self._probes.values() if not probe.is_running)
        return min(times, default=None)

    @property
    def cpu_s(self) -> float:
        """The processor time of all runs, and of the processes in which they run."""
        return self._start_cpu_s + sum(probe.cpu_s for probe in self._probes.values())

    def cpu_ratio(self, now: float) -> float:
        """That processor time since the beginning, 1 for a whole core."""
        passed_s = now - self._began
        return self.cpu_s / passed_s if passed_s > 0 else 0.0

    def _fraction(self, name: str, run: int) -> float:
        """A number from 0 to 1: another one for each node, probe and run."""
        return zlib.crc32(f"{self._seed}/{name}/{run}".encode()) / 0xFFFFFFFF
