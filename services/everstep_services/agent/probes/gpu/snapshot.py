"""Reads the state of one GPU from NVML; None for everything that it lacks."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from everstep_services.agent.probes.gpu.nvml import GpuGoneError, Nvml


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A process that holds memory of a GPU."""

    pid: int
    """Its process id; 0 if it is in another pid namespace."""
    mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The state of a GPU in its NVLink fabric. None where that is in doubt."""

    is_joined: bool
    """The fabric manager has finished its setup."""
    has_failed: bool = False
    """The setup has finished, and failed."""
    is_route_bad: bool = False
    is_slow: bool = False
    is_misconfigured: bool = False
    domain: str = ""
    """The NVLink domain, `nvlink-` and the ClusterUUID; empty for a fabric of this node alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSnapshot:
    """One GPU at one moment."""

    index: int
    """The index by NVML, which is the order of PCI addresses."""
    uuid: str
    pci: str = ""
    """`0000:3b:00.0`."""
    gone: GpuGoneError | None = None
    """The GPU does not answer: nothing below is known."""
    recovery_action: int | None = None
    uncorrected: int | None = None
    """ECC errors since the driver was loaded or the GPU reset."""
    uncorrected_ever: int | None = None
    is_sram_worn: bool | None = None
    """Errors of its SRAM have passed NVIDIA's threshold for a replacement."""
    rows_remapped: int | None = None
    """After uncorrectable errors."""
    is_remap_pending: bool | None = None
    has_remap_failed: bool | None = None
    is_retirement_pending: bool | None = None
    """The same for cards that retire pages, before Ampere."""
    slowed_by: tuple[str, ...] = ()
    """Why hardware or heat holds its clocks back; a power limit does not count."""
    temperature_c: int | None = None
    slows_down_at_c: int | None = None
    holders: tuple[MemoryHolder, ...] = ()
    fabric: Fabric | None = None
    is_mig: bool | None = None
    is_persistent: bool | None = None
    unreadable: tuple[str, ...] = ()


_SLOWED = (
    ("nvmlClocksEventReasonHwThermalSlowdown", "heat (hardware)"),
    ("nvmlClocksEventReasonHwPowerBrakeSlowdown", "the power brake"),
    ("nvmlClocksEventReasonSwThermalSlowdown", "heat (driver)"),
)


def read(nvml: Nvml, index: int) -> GpuSnapshot:
    """The state of the GPU with this index; never raises for a GPU that is gone."""
    uuid, pci = f"GPU index {index}", ""
    try:
        gpu = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if gpu is not None:
            uuid = nvml.ask("nvmlDeviceGetUUID", gpu) or uuid
            pci = pci_address(nvml.ask("nvmlDeviceGetPciInfo", gpu))
            pages = _known(nvml, gpu)
            return GpuSnapshot(
                index=index, uuid=uuid, pci=pci, unreadable=nvml.take_unreadable(), **pages
            )
    except GpuGoneError as gone:
        nvml.take_unreadable()
        return GpuSnapshot(index=index, uuid=uuid, pci=pci, gone=gone)
    unreadable = nvml.take_unreadable() or ("it could not be opened",)
    return GpuSnapshot(index=index, uuid=uuid, unreadable=unreadable)


def pci_address(info: Any) -> str:
    """The name in `/sys/bus/pci/devices`; empty if NVML does not give one."""
    if info is None:
        return ""
    raw = info.busId.decode() if isinstance(info.busId, bytes) else info.busId
    domain, _, rest = raw.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _known(nvml: Nvml, gpu: Any) -> dict[str, Any]:
    rows = nvml.ask("nvmlDeviceGetRemappedRows", gpu)
    sram = nvml.struct("nvmlDeviceGetSramEccErrorStatus", gpu, "c_nvmlEccSramErrorStatus_v1_t")
    mig = nvml.ask("nvmlDeviceGetMigMode", gpu)
    return {
        "recovery_action": nvml.field(gpu, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        "uncorrected": _errors(nvml, gpu, "NVML_VOLATILE_ECC"),
        "uncorrected_ever": _errors(nvml, gpu, "NVML_AGGREGATE_ECC"),
        "is_sram_worn": sram and bool(sram.bThresholdExceeded),
        "rows_remapped": rows and rows[1],
        "is_remap_pending": rows and bool(rows[2]),
        "has_remap_failed": rows and bool(rows[3]),
        "is_retirement_pending": _flag(nvml, gpu, "nvmlDeviceGetRetiredPagesPendingStatus"),
        "slowed_by": _slowed_by(nvml, gpu),
        "temperature_c": _temperature(nvml, gpu),
        "slows_down_at_c": nvml.ask(
            "nvmlDeviceGetTemperatureThreshold",
            gpu,
            nvml.number("NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"),
        ),
        "holders": _holders(nvml, gpu),
        "fabric": _fabric(nvml, gpu),
        "is_mig": mig and mig[0] == nvml.number("NVML_DEVICE_MIG_ENABLE"),
        "is_persistent": _flag(nvml, gpu, "nvmlDeviceGetPersistenceMode"),
    }


def _errors(nvml: Nvml, gpu: Any, since: str) -> int | None:
    count = nvml.ask(
        "nvmlDeviceGetTotalEccErrors",
        gpu,
        nvml.number("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
        nvml.number(since),
    )
    return None if count is None else int(count)


def _flag(nvml: Nvml, gpu: Any, function: str) -> bool | None:
    flag = nvml.ask(function, gpu)
    return None if flag is None else flag == nvml.number("NVML_FEATURE_ENABLED")


def _temperature(nvml: Nvml, gpu: Any) -> int | None:
    sensor = nvml.number("NVML_TEMPERATURE_GPU")
    answer = nvml.ask("nvmlDeviceGetTemperatureV", gpu, sensor)
    if answer is None:  # drivers before 570
        answer = nvml.ask("nvmlDeviceGetTemperature", gpu, sensor)
    return None if answer is None else int(answer)


def _slowed_by(nvml: Nvml, gpu: Any) -> tuple[str, ...]:
    reasons = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", gpu)
    if reasons is None:  # drivers before 535
        reasons = nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu) or 0
    named = tuple(word for name, word in _SLOWED if reasons & nvml.number(name))
    if not named and reasons & nvml.number("nvmlClocksEventReasonHwSlowdown"):
        return ("the hardware",)
    return named


def _holders(nvml: Nvml, gpu: Any) -> tuple[MemoryHolder, ...]:
    listed = nvml.ask("nvmlDeviceGetComputeRunningProcesses_v3", gpu) or ()
    return tuple(
        MemoryHolder(each.pid, None if each.usedGpuMemory is None else each.usedGpuMemory >> 20)
        for each in listed
    )


def _fabric(nvml: Nvml, gpu: Any) -> Fabric | None:
    info = nvml.struct("nvmlDeviceGetGpuFabricInfoV", gpu, "c_nvmlGpuFabricInfoV_t")
    if info is None or info.state == nvml.number("NVML_GPU_FABRIC_STATE_NOT_SUPPORTED"):
        return None
    is_joined = info.state == nvml.number("NVML_GPU_FABRIC_STATE_COMPLETED")
    return Fabric(
        is_joined=is_joined,
        has_failed=is_joined and info.status != nvml.number("NVML_SUCCESS"),
        is_route_bad=_is_set(nvml, info.healthMask, "ROUTE_UNHEALTHY"),
        is_slow=_is_set(nvml, info.healthMask, "DEGRADED_BW"),
        is_misconfigured=_part(nvml, info.healthMask, "INCORRECT_CONFIGURATION") > 1,
        domain=_domain(bytes(info.clusterUuid)) if is_joined else "",
    )


def _domain(cluster: bytes) -> str:
    """The name of an NVLink domain; zeros stand for none."""
    return f"nvlink-{UUID(bytes=cluster)}" if any(cluster) else ""


def _is_set(nvml: Nvml, mask: int, part: str) -> bool:
    return _part(nvml, mask, part) == nvml.number(f"NVML_GPU_FABRIC_HEALTH_MASK_{part}_TRUE")


def _part(nvml: Nvml, mask: int, part: str) -> int:
    prefix = "NVML_GPU_FABRIC_HEALTH_MASK_"
    shift, width = nvml.number(f"{prefix}SHIFT_{part}"), nvml.number(f"{prefix}WIDTH_{part}")
    return mask >> shift & width
