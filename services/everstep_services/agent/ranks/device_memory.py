"""Accelerator memory that the driver still counts for processes that are gone."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.clock import Clock
from everstep_services.agent.probes.gpu.nvml import GpuGoneError, Load, NvmlAwayError, load, opened

_LOOK_EVERY_S = 0.05
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


def held(pids: Collection[int], library: Load = load) -> Mapping[int, int]:
    """The bytes that each of these processes holds, over all devices."""
    by_pid: dict[int, int] = {}
    try:
        with opened(library) as nvml:
            for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
                gpu = nvml.ask("nvmlDeviceGetHandleByIndex", index)
                for process in nvml.ask("nvmlDeviceGetComputeRunningProcesses_v3", gpu) or ():
                    if process.pid in pids:
                        octets = process.usedGpuMemory or 0
                        by_pid[process.pid] = by_pid.get(process.pid, 0) + octets
    except (NvmlAwayError, GpuGoneError):
        return {}  # the checks report the reason
    return by_pid
