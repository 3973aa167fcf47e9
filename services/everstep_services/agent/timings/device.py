"""The accelerators of ranks, from the driver; empty where there is none."""

from collections.abc import Collection
from typing import Any

from everstep.messages import DeviceUse
from everstep_services.agent.probes.gpu.nvml import (
    GpuGoneError,
    Load,
    Nvml,
    NvmlAwayError,
    load,
    opened,
)
from everstep_services.agent.ranks.device_memory import has_devices

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
