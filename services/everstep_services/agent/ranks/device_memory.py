"""Accelerator memory that the driver still counts for processes that are gone."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from everstep.clock import Clock
from everstep_services.agent.probes.gpu.nvml import GpuGoneError, Load, NvmlAwayError, load, opened

_LOOK_EVERY_S = 0.05
_STRANGERS_WITHIN_S = 10.0
_HOST_PIDS = 0xEFFFFFFC
"""The inode of the host's own pid namespace (`PROC_PID_INIT_INO`)."""
_DRIVER = Path("/dev/nvidiactl")
_DRIVERS = (_DRIVER, Path("/dev/kfd"))


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The memory that processes which are gone still hold after the wait."""

    wait_s: float = 0.0
    octets: int = 0
    by: str = ""


def has_devices(drivers: Collection[Path] = _DRIVERS) -> bool:
    """Whether ranks of this node are likely to train on accelerators."""
    return any(driver.exists() for driver in drivers)


class DeviceMemory:
    """Waits for the memory of ranks. In a container NVML may name processes as the host does.

    There, processes that were on the devices before the ranks began, or after the wait, are not of
    this job; all others count as its ranks, and the agent waits for them briefly.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        driver: Path = _DRIVER,
        library: Load = load,
        has_own_pids: bool | None = None,
    ) -> None:
        self._clock = clock
        self._driver = driver
        self._library = library
        self._has_own_pids = _has_own_pids() if has_own_pids is None else has_own_pids
        self._others: Collection[int] | None = None

    async def note_others(self) -> None:
        """Note who is on the devices before the first ranks are started."""
        if self._has_own_pids and self._others is None and self._driver.exists():
            self._others = await self._on_devices()

    async def wait_until_free(
        self, pids: Collection[int], within_s: float, *, has_kept: bool = False
    ) -> HeldMemory:
        """Wait until no device counts memory for these processes.

        `has_kept`: other ranks keep their memory, and look like strangers.
        """
        done = await wait_until_free(
            pids,
            within_s,
            self._clock,
            driver=self._driver,
            look=lambda of: held(of, self._library),
        )
        is_over = not pids or done.wait_s >= within_s or has_kept
        if not self._has_own_pids or is_over or self._others is None:
            return done
        others = self._others
        more = await wait_until_free(
            pids,
            min(_STRANGERS_WITHIN_S, within_s - done.wait_s),
            self._clock,
            driver=self._driver,
            look=lambda _: {
                pid: octets
                for pid, octets in held(None, self._library).items()
                if pid not in others
            },
        )
        self._others = await self._on_devices()
        return HeldMemory(done.wait_s + more.wait_s, more.octets, more.by)

    async def _on_devices(self) -> Collection[int] | None:
        try:
            async with asyncio.timeout(_STRANGERS_WITHIN_S):
                return frozenset(await asyncio.to_thread(held, None, self._library))
        except TimeoutError:
            return None


def _has_own_pids() -> bool:
    """Whether processes have other ids here than on the host."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != _HOST_PIDS
    return False


async def wait_until_free(
    pids: Collection[int],
    within_s: float,
    clock: Clock,
    *,
    driver: Path = _DRIVER,
    look: Callable[[Collection[int]], Mapping[int, int]] | None = None,
) -> HeldMemory:
    """Wait until no device counts memory for these processes; at once where there is no driver."""
    if not pids or not os.path.exists(driver):  # noqa: ASYNC240  a name in /dev: it never waits
        return HeldMemory()
    look = look or held
    began = clock.now()
    while True:
        try:
            async with asyncio.timeout(max(0.0, began + within_s - clock.now())):
                still = await asyncio.to_thread(look, pids)
        except TimeoutError:  # a driver that does not answer delays nobody
            return HeldMemory(clock.now() - began, 0, "the driver does not answer")
        waited_s = clock.now() - began
        if not still or waited_s >= within_s:
            by = ", ".join(f"process {pid}" for pid in sorted(still))
            return HeldMemory(waited_s, sum(still.values()), by)
        await clock.sleep(_LOOK_EVERY_S)


def held(pids: Collection[int] | None, library: Load = load) -> Mapping[int, int]:
    """The bytes that each of these processes holds, over all devices; of all processes if None."""
    by_pid: dict[int, int] = {}
    try:
        with opened(library) as nvml:
            for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
                gpu = nvml.ask("nvmlDeviceGetHandleByIndex", index)
                for process in nvml.ask("nvmlDeviceGetComputeRunningProcesses_v3", gpu) or ():
                    if pids is None or process.pid in pids:
                        octets = process.usedGpuMemory or 0
                        by_pid[process.pid] = by_pid.get(process.pid, 0) + octets
    except (NvmlAwayError, GpuGoneError):
        return {}  # the checks report the reason
    return by_pid
