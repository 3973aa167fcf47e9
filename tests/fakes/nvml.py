"""NVML without a driver: the module `pynvml`, with answers that a test chooses.

Constants, structures and errors are those of the real module; `tests/contract/test_nvml.py` holds
the functions to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
FUNCTION_NOT_FOUND = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
GPU_IS_LOST = pynvml.NVML_ERROR_GPU_IS_LOST
RESET_REQUIRED = pynvml.NVML_ERROR_RESET_REQUIRED
UNKNOWN = pynvml.NVML_ERROR_UNKNOWN

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """One GPU. A field that is None is not supported by the card."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    bus_id: str = "00000000:18:00.0"
    recovery_action: int | None = 0
    ecc: tuple[int, int] | None = (0, 0)
    """Uncorrected errors: volatile, aggregate."""
    sram_threshold: bool | None = False
    remapped: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    retired_pending: bool | None = None
    event_reasons: int | None = 0
    temperature: int | None = 41
    slowdown_at: int | None = 87
    processes: tuple[tuple[int, int | None], ...] | None = ()
    """Each with its pid and how many bytes it holds."""
    fabric: tuple[int, int, int] | None = None
    """State, status and health mask."""
    cluster: bytes = bytes(16)
    """The ClusterUUID of its fabric; zeros where the fabric is of one node."""
    mig: bool | None = False
    parts: tuple[str, ...] = ()
    """The ids of its parts in MIG mode."""
    persistence: bool | None = True
    links: Mapping[int, int] = field(default_factory=dict)
    """The state of each link that the card has."""
    link_errors: Mapping[int, int] = field(default_factory=dict)
    """Replays of each link: none for a link that does not count them so."""
    link_fields: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Values of a link's fields, by field and link."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """Functions that fail with this error."""

    def but(self, **changed: Any) -> "Card":
        return replace(self, **changed)


@dataclass
class FakeNvml:
    """What `import pynvml` gives."""

    cards: Sequence[Card] = ()
    init_error: int | None = None
    absent: frozenset[str] = frozenset()
    """Functions that the driver is too old for."""
    open_count: int = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(pynvml, name)
        is_function = callable(value) and not isinstance(value, type)
        if is_function:
            raise AttributeError(f"the fake has no {name}")
        return value

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.open_count -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._said("nvmlDeviceGetHandleByIndex", self.cards[index], lambda card: card)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        for card in self.cards:
            if uuid == card.uuid:
                return card
            if uuid in card.parts:
                return uuid  # no other function takes the handle of a part
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: str) -> Any:
        return next(card for card in self.cards if migDevice in card.parts)

    def nvmlDeviceGetUUID(self, handle: Card) -> Any:
        return self._said("nvmlDeviceGetUUID", handle, lambda card: card.uuid)

    def nvmlDeviceGetName(self, handle: Card) -> Any:
        return self._said("nvmlDeviceGetName", handle, lambda card: card.name)

    def nvmlDeviceGetPciInfo(self, handle: Card) -> Any:
        info = pynvml.nvmlPciInfo_t()
        info.busId = handle.bus_id.encode()
        return self._said("nvmlDeviceGetPciInfo", handle, lambda card: info)

    def nvmlDeviceGetTotalEccErrors(self, handle: Card, errorType: int, counterType: int) -> Any:
        assert errorType == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return self._said(
            "nvmlDeviceGetTotalEccErrors",
            handle,
            lambda card: None if card.ecc is None else card.ecc[counterType],
        )

    def nvmlDeviceGetSramEccErrorStatus(self, device: Card, status: Any) -> int:
        exceeded = self._said(
            "nvmlDeviceGetSramEccErrorStatus", device, lambda card: card.sram_threshold
        )
        status._obj.bThresholdExceeded = exceeded
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetRemappedRows(self, device: Card) -> Any:
        return self._said("nvmlDeviceGetRemappedRows", device, lambda card: card.remapped)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: Card) -> int:
        return int(
            self._said(
                "nvmlDeviceGetRetiredPagesPendingStatus", device, lambda card: card.retired_pending
            )
        )

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Card) -> Any:
        return self._said(
            "nvmlDeviceGetCurrentClocksEventReasons", handle, lambda card: card.event_reasons
        )

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Card) -> Any:
        return self._said(
            "nvmlDeviceGetCurrentClocksThrottleReasons", handle, lambda card: card.event_reasons
        )

    def nvmlDeviceGetTemperatureV(
        self, handle: Card, sensor: int, version: int = pynvml.nvmlTemperature_v1
    ) -> Any:
        return self._said("nvmlDeviceGetTemperatureV", handle, lambda card: card.temperature)

    def nvmlDeviceGetTemperature(self, handle: Card, sensor: int) -> Any:
        return self._said("nvmlDeviceGetTemperature", handle, lambda card: card.temperature)

    def nvmlDeviceGetTemperatureThreshold(self, handle: Card, threshold: int) -> Any:
        assert threshold == pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return self._said(
            "nvmlDeviceGetTemperatureThreshold", handle, lambda card: card.slowdown_at
        )

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Card) -> list[Any]:
        listed = self._said(
            "nvmlDeviceGetComputeRunningProcesses_v3", handle, lambda card: card.processes
        )
        return [_Process(pid, held) for pid, held in listed]

    def nvmlDeviceGetGpuFabricInfoV(self, device: Card, gpuFabricInfo: Any) -> int:
        said = self._said("nvmlDeviceGetGpuFabricInfoV", device, lambda card: card.fabric)
        info = gpuFabricInfo._obj
        info.state, info.status, info.healthMask = said
        info.clusterUuid[:] = device.cluster
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetMigMode(self, device: Card) -> list[int]:
        said = self._said("nvmlDeviceGetMigMode", device, lambda card: card.mig)
        return [int(said), int(said)]

    def nvmlDeviceGetPersistenceMode(self, handle: Card) -> int:
        said = self._said("nvmlDeviceGetPersistenceMode", handle, lambda card: card.persistence)
        return int(said)

    def nvmlDeviceGetNvLinkState(self, device: Card, link: int) -> Any:
        return self._said(
            "nvmlDeviceGetNvLinkState",
            device,
            lambda card: card.links.get(link),
            # As the driver does: an index past the card's own links is not a valid argument.
            pynvml.NVML_ERROR_INVALID_ARGUMENT if device.links else NOT_SUPPORTED,
        )

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Card, link: int, counter: int) -> Any:
        def errors(card: Card) -> int | None:
            if link not in card.link_errors:
                return None
            return card.link_errors[link] if counter == pynvml.NVML_NVLINK_ERROR_DL_REPLAY else 0

        return self._said("nvmlDeviceGetNvLinkErrorCounter", device, errors)

    def nvmlDeviceGetFieldValues(self, handle: Card, fieldIds: Sequence[Any]) -> Any:
        self._said("nvmlDeviceGetFieldValues", handle, lambda card: True)
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, (wanted, scope) in zip(values, fieldIds, strict=True):
            value.fieldId, value.scopeId = wanted, scope
            said = (
                handle.recovery_action
                if wanted == pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
                else handle.link_fields.get((wanted, scope))
            )
            if said is None:
                value.nvmlReturn = NOT_SUPPORTED
                continue
            value.nvmlReturn = pynvml.NVML_SUCCESS
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            value.value.uiVal = said
        return values

    def _said(
        self, function: str, card: Card, answer: Callable[[Card], Any], lacking: int = NOT_SUPPORTED
    ) -> Any:
        if function in self.absent:
            raise pynvml.NVMLError(FUNCTION_NOT_FOUND)
        if function in card.broken:
            raise pynvml.NVMLError(card.broken[function])
        said = answer(card)
        if said is None:
            raise pynvml.NVMLError(lacking)
        return said


@dataclass(frozen=True)
class _Process:
    pid: int
    usedGpuMemory: int | None


_JOINED = (pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, pynvml.NVML_SUCCESS, 0)
_UP, _DOWN = pynvml.NVML_FEATURE_ENABLED, pynvml.NVML_FEATURE_DISABLED


def pcie() -> FakeNvml:
    """Two cards in slots. They have links, and no bridge between them."""
    return FakeNvml(
        [
            Card(
                f"GPU-pcie-{index}", "NVIDIA A100 80GB PCIe", links=dict.fromkeys(range(12), _DOWN)
            )
            for index in range(2)
        ]
    )


def hgx() -> FakeNvml:
    """Eight H100 on a board with NVSwitches."""
    return FakeNvml(
        [
            Card(
                f"GPU-hgx-{index}",
                bus_id=f"00000000:{0x18 + 0x10 * index:02X}:00.0",
                fabric=_JOINED,
                links=dict.fromkeys(range(18), _UP),
                link_errors=dict.fromkeys(range(18), 0),
            )
            for index in range(8)
        ]
    )


NVL72_CLUSTER = "f2c177aa-0000-4000-8000-0123456789ab"


def nvl72() -> FakeNvml:
    """One tray of a rack: four GPUs whose fabric spans the rack, with links of NVLink 5."""
    healthy = (
        pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE
        | pynvml.NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_FALSE
        << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY
        | pynvml.NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE
        << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
    )
    counted = {
        (field, link): 0
        for field in (
            pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
            pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
            pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
        )
        for link in range(18)
    }
    return FakeNvml(
        [
            Card(
                f"GPU-nvl-{index}",
                "NVIDIA GB200",
                bus_id=f"0000{8 + index:04X}:01:00.0",
                fabric=(*_JOINED[:2], healthy),
                cluster=bytes.fromhex(NVL72_CLUSTER.replace("-", "")),
                links=dict.fromkeys(range(18), _UP),
                link_fields=counted,
            )
            for index in range(4)
        ]
    )


def mig() -> FakeNvml:
    """A GPU that is cut into instances: it tells less of itself."""
    card = Card(
        "GPU-mig-0",
        mig=True,
        processes=None,
        event_reasons=None,
        broken={"nvmlDeviceGetNvLinkState": NOT_SUPPORTED},
    )
    return FakeNvml([card])


def no_nvlink() -> FakeNvml:
    """A card that has no links at all."""
    return FakeNvml([Card("GPU-l40s-0", "NVIDIA L40S")])


def old_driver() -> FakeNvml:
    """A driver of 2022, under a package of today."""
    card = Card("GPU-old-0", "NVIDIA A100-SXM4-40GB", recovery_action=None, sram_threshold=None)
    return FakeNvml(
        [card],
        absent=frozenset(
            {
                "nvmlDeviceGetCurrentClocksEventReasons",
                "nvmlDeviceGetTemperatureV",
                "nvmlDeviceGetGpuFabricInfoV",
                "nvmlDeviceGetSramEccErrorStatus",
            }
        ),
    )


def not_available() -> FakeNvml:
    """A card that answers N/A to nearly everything, as consumer cards do."""
    return FakeNvml(
        [
            Card(
                "GPU-na-0",
                "NVIDIA GeForce RTX 3060",
                recovery_action=None,
                ecc=None,
                sram_threshold=None,
                remapped=None,
                event_reasons=None,
                temperature=None,
                slowdown_at=None,
                processes=((4711, None),),
                mig=None,
                persistence=None,
            )
        ]
    )


PROFILES: Mapping[str, Callable[[], FakeNvml]] = {
    "pcie": pcie,
    "hgx": hgx,
    "nvl72": nvl72,
    "mig": mig,
    "no-nvlink": no_nvlink,
    "old-driver": old_driver,
    "not-available": not_available,
}
