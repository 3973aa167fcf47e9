"""Lets a script check the GPU of its rank: by NVML, and by a short computation."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from trainer_sdk.environment import environ

GpuState = Literal["ok", "warning", "failed", "unknown", "no_gpu"]
"""`unknown` where nobody can tell, which is not a failure."""

_ACTIONS = {
    1: "a reset", 2: "a reboot of the node", 3: "a drain", 4: "a drain and a reset",
    6: "a reset of its bus", 7: "a reboot of the system",
}  # fmt: skip
"""What the driver asks for, by NVML's numbers of recovery actions. 5 is for an IMEX domain."""
_SIZE = 256


class UnknownGpuError(Exception):
    """Nobody can tell which of the GPUs that NVML knows is meant."""


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """The state of the GPU of this rank."""

    state: GpuState
    reason: str
    """What was found; for `ok` what was looked at."""
    device: int | None = None
    """The number of the GPU in this process; None without a GPU."""
    uuid: str = ""
    """The GPU's id by NVML: `GPU-5e9c…`."""

    @property
    def is_usable(self) -> bool:
        """The check did not find the GPU broken, and there is one."""
        return self.state in {"ok", "warning", "unknown"}


def gpu_check(device: int | None = None, *, computes: bool = False) -> GpuCheck:
    """The state of a GPU; by default that of this rank (`LOCAL_RANK`). Never raises.

    NVML is asked where `nvidia-ml-py` is installed, which takes some milliseconds. With `computes`,
    torch multiplies two matrices on the GPU and compares the exact result, which waits for the
    work that the GPU has queued; call it between steps.
    """
    try:
        return _check(device, computes=computes)
    except Exception as error:  # noqa: BLE001  a check never ends a training
        return GpuCheck("unknown", f"the check itself failed: {type(error).__name__}: {error}")


def _check(device: int | None, *, computes: bool) -> GpuCheck:
    number = device_number(device)
    by_nvml = _by_nvml(number)
    if by_nvml is not None and by_nvml.state in {"failed", "no_gpu"}:
        return by_nvml
    if computes:
        return _by_computing(number, by_nvml)
    if by_nvml is None:
        if _cuda() is None:
            return GpuCheck(
                "no_gpu", "no GPU: neither NVML nor CUDA is there; ranks run on the CPU"
            )
        return GpuCheck(
            "unknown", "nvidia-ml-py is not installed: pip install nvidia-ml-py", number
        )
    return by_nvml


def device_number(device: int | None) -> int:
    if device is not None:
        return device
    text = environ.get("LOCAL_RANK", "0")
    return int(text) if text.isdecimal() else 0


def _by_nvml(number: int) -> GpuCheck | None:
    """The GPU by NVML; None where NVML is not installed."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        absent = {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED}
        if error.value in absent:
            return GpuCheck("no_gpu", f"no GPU: {error}")
        return GpuCheck("unknown", f"NVML could not be opened: {error}")
    try:
        return _of_device(nvml, number)
    except UnknownGpuError as error:
        return GpuCheck("unknown", str(error), number)
    except nvml.NVMLError as error:
        lost = {nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED}
        return GpuCheck("failed" if error.value in lost else "unknown", str(error), number)
    finally:
        nvml.nvmlShutdown()


def _of_device(nvml: Any, number: int) -> GpuCheck:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or nvml.nvmlDeviceGetCount() == 0:
        return GpuCheck("no_gpu", "no GPU is visible to this process")
    handle = nvml_handle(nvml, number, visible)
    if handle is None:
        return GpuCheck("no_gpu", f"no GPU {number}: CUDA_VISIBLE_DEVICES={visible}", None)
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    asked = field_of(nvml, handle, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    if asked:
        action = _ACTIONS.get(asked, f"recovery action {asked}")
        state: GpuState = "failed" if asked in _ACTIONS else "warning"
        return GpuCheck(state, f"the driver asks for {action}", number, uuid)
    corrected, uncorrected, pending, has_failed = _rows(nvml, handle)
    if has_failed:
        return GpuCheck("failed", "no spare rows of memory are left", number, uuid)
    if pending:
        return GpuCheck("warning", "memory is repaired at the next reset", number, uuid)
    rows = f"; {corrected + uncorrected} rows remapped" if corrected + uncorrected else ""
    return GpuCheck("ok", f"NVML finds no fault{rows}", number, uuid)


def nvml_handle(nvml: Any, number: int, visible: str | None) -> Any:
    """NVML's handle of a GPU: NVML numbers all GPUs, CUDA only the visible ones.

    Of a part (MIG) it is that of the whole GPU: a part has no rows, no links and no recovery.
    """
    if visible is None:
        return _by_number(nvml, number)
    names = [name.strip() for name in visible.split(",")]
    if number >= len(names):
        return None
    name = names[number]
    if name.isdecimal():
        return _by_number(nvml, int(name))
    if name.startswith("MIG-"):
        part = nvml.nvmlDeviceGetHandleByUUID(name)
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
    # CUDA takes the beginning of an id that only one GPU has; NVML does not.
    alike = [gpu for gpu, uuid in _each(nvml, nvml.nvmlDeviceGetUUID) if uuid.startswith(name)]
    if len(alike) != 1:
        raise UnknownGpuError(f"CUDA_VISIBLE_DEVICES={visible}: {name} names {len(alike)} GPUs")
    return alike[0]


def _by_number(nvml: Any, number: int) -> Any:
    """NVML numbers GPUs by their places on the bus; CUDA by default the fastest first."""
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    models = {model for _, model in _each(nvml, nvml.nvmlDeviceGetName)}
    if len(models) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise UnknownGpuError("GPUs differ here: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return handle


def _each(nvml: Any, question: Callable[[Any], str | bytes]) -> Iterator[tuple[Any, str]]:
    """The GPUs that answer, each with its answer: a broken one says nothing about the others."""
    for number in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            yield gpu, _text(question(gpu))


def _rows(nvml: Any, handle: Any) -> tuple[int, int, bool, bool]:
    """Remapped rows of memory; none for a card that has no such table."""
    try:
        corrected, uncorrected, pending, failure = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError:
        return 0, 0, False, False
    return corrected, uncorrected, bool(pending), bool(failure)


def field_of(nvml: Any, handle: Any, name: str, scope: int = 0) -> int:
    """A value that older drivers do not have; 0 for none."""
    field = getattr(nvml, name, None)
    if field is None:
        return 0
    try:
        (value,) = nvml.nvmlDeviceGetFieldValues(handle, [(field, scope)])
    except nvml.NVMLError:
        return 0
    return int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cuda() -> Any:
    """The module torch, where CUDA has a device."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _by_computing(number: int, by_nvml: GpuCheck | None) -> GpuCheck:
    torch = _cuda()
    if torch is None:
        return GpuCheck("no_gpu", "no GPU: torch has no CUDA device; ranks run on the CPU")
    uuid = by_nvml.uuid if by_nvml is not None else ""
    if number >= torch.cuda.device_count():
        return GpuCheck("no_gpu", f"no GPU {number}: torch sees {torch.cuda.device_count()}")
    try:
        whole = torch.arange(_SIZE * _SIZE).reshape(_SIZE, _SIZE) % 7
        # Sums of small whole numbers are exact in float32, whatever their order.
        expected = whole.float() @ whole.float().T
        there = whole.float().to(f"cuda:{number}")
        is_right = bool(((there @ there.T).cpu() == expected).all())
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        return GpuCheck("failed", f"it cannot compute: {line}", number, uuid)
    if not is_right:
        return GpuCheck("failed", "it computes wrong results: replace it", number, uuid)
    if by_nvml is not None and by_nvml.state == "warning":
        return by_nvml
    return GpuCheck("ok", "a product of matrices is exact", number, uuid)
