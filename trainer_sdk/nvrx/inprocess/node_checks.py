"""Checks of a rank's GPU, its NVLinks and its network port, made before each iteration.

They ask NVML and sysfs, so they need no agent. What cannot be asked passes.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trainer_sdk.device.gpu_state import (
    UnknownGpuError,
    device_number,
    field_of,
    gpu_check,
    nvml_handle,
)
from trainer_sdk.environment import environ
from trainer_sdk.nvrx.inprocess.plugins import (
    CudaHealthCheck,
    FaultCounter,
    FaultCounterExceeded,
    HealthCheck,
)
from trainer_sdk.nvrx.inprocess.state import FrozenState, HealthCheckError

_PCI = Path("/sys/bus/pci/devices")
_INFINIBAND = Path("/sys/class/infiniband")
_Answer = TypeVar("_Answer")

__all__ = [
    "ChainedGPUHealthCheck",
    "ChainedNVLHealthCheck",
    "ChainedNicHealthCheck",
    "CudaHealthCheck",
    "FaultCounter",
    "FaultCounterExceeded",
    "HealthCheck",
]


class _NodeCheck(HealthCheck):
    """A check of what belongs to a GPU; by default to that of this rank."""

    def __init__(self, device_index: int | None = None) -> None:
        self.device_index = device_index

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise `HealthCheckError` if the rank should take part in no further iteration."""
        if trouble := self.trouble():
            raise HealthCheckError(trouble)
        return state

    def trouble(self) -> str:
        """What is broken; empty for nothing."""
        raise NotImplementedError


class ChainedGPUHealthCheck(_NodeCheck):
    """Asks NVML whether the driver wants a recovery of the GPU, or the GPU is lost."""

    def trouble(self) -> str:
        """Why the GPU is not usable."""
        check = gpu_check(self.device_index)
        return f"GPU {check.device}: {check.reason}" if check.state == "failed" else ""


class ChainedNVLHealthCheck(_NodeCheck):
    """Notices NVLinks that were active at the first check. Links without a bridge never are."""

    def __init__(self, device_index: int | None = None) -> None:
        super().__init__(device_index)
        self._first: frozenset[int] | None = None

    def trouble(self) -> str:
        """Which links are down."""
        active = _of_gpu(self.device_index, _active_links)
        if active is None:
            return ""
        self._first = self._first or active
        lost = ", ".join(map(str, sorted(self._first - active)))
        return f"NVLink {lost} of the GPU is not active any more" if lost else ""


class ChainedNicHealthCheck(_NodeCheck):
    """Notices that the InfiniBand port nearest to the GPU is down, or was since the last check."""

    def __init__(
        self, device_index: int | None = None, *, pci: Path = _PCI, infiniband: Path = _INFINIBAND
    ) -> None:
        super().__init__(device_index)
        self._pci = pci
        self._infiniband = infiniband
        self._before: dict[Path, tuple[bool, int]] = {}

    def trouble(self) -> str:
        """Which port has lost its link."""
        before, self._before = self._before, dict(self._ports())
        for port, (is_active, downs) in self._before.items():
            was_active, downs_before = before.get(port, (False, downs))
            if downs > downs_before or (was_active and not is_active):
                return f"port {port.name} of {port.parents[1].name} has lost its link"
        return ""

    def _ports(self) -> Iterator[tuple[Path, tuple[bool, int]]]:
        for port in sorted((self._nearest() / "ports").glob("*")):
            try:
                is_active = "ACTIVE" in (port / "state").read_text()
                downs = int((port / "counters" / "link_downed").read_text())
            except (OSError, ValueError):
                continue
            yield port, (is_active, downs)

    def _nearest(self) -> Path:
        """The adapter that has most bridges in common with the GPU; a path to nothing without."""
        address = _of_gpu(self.device_index, _pci_address) or ""
        own = os.path.realpath(self._pci / address)
        adapters = sorted(self._infiniband.glob("*"))

        def shared(adapter: Path) -> int:
            there = os.path.realpath(adapter / "device")
            return len(Path(os.path.commonpath([own, there])).parts)

        return max(adapters, key=shared) if address and adapters else self._infiniband / "none"


def _of_gpu(number: int | None, question: Callable[[Any, Any], _Answer]) -> _Answer | None:
    """The answer of NVML about a GPU; None if it gives none."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, or no driver
        return None
    try:
        handle = nvml_handle(nvml, device_number(number), environ.get("CUDA_VISIBLE_DEVICES"))
        return None if handle is None else question(nvml, handle)
    except (nvml.NVMLError, UnknownGpuError):
        return None
    finally:
        nvml.nvmlShutdown()


def _active_links(nvml: Any, gpu: Any) -> frozenset[int]:
    links = set()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if _is_up(nvml, gpu, link):
                links.add(link)
        except nvml.NVMLError:
            continue  # the card has no such link
    return frozenset(links)


def _is_up(nvml: Any, gpu: Any, link: int) -> bool:
    """Whether a link is active, or sleeps to save power: then it does not count as enabled."""
    if nvml.nvmlDeviceGetNvLinkState(gpu, link) == nvml.NVML_FEATURE_ENABLED:
        return True
    state = field_of(nvml, gpu, "NVML_FI_DEV_NVLINK_GET_STATE", link)
    return bool(state == nvml.NVML_NVLINK_STATE_SLEEP)


def _pci_address(nvml: Any, gpu: Any) -> str:
    raw = nvml.nvmlDeviceGetPciInfo(gpu).busId
    domain, _, rest = (raw.decode() if isinstance(raw, bytes) else raw).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
