"""Asks NVML, and tells its many refusals apart."""

import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import CheckState, FailureClass

_NOT_THERE = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_NO_DATA",
    "NVML_ERROR_DEPRECATED",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
)
"""Refusals: the card lacks it, an older driver does not know it, or this user may not see it."""
_NO_DRIVER = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")
_UNION_FIELD = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The type of a field, by NVML's number for types."""


class NvmlAwayError(Exception):
    """NVML cannot be asked on this node."""

    def __init__(self, state: CheckState, reason: str, failure_class: FailureClass = "") -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason
        self.failure_class = failure_class

    def result(self, check: str) -> CheckResult:
        """The result of the check that needs NVML."""
        return CheckResult(
            check=check, state=self.state, reason=self.reason, failure_class=self.failure_class
        )


class GpuGoneError(Exception):
    """NVML knows that this GPU does not answer, or answers only after a reset."""

    def __init__(self, reason: str, failure_class: FailureClass) -> None:
        super().__init__(reason)
        self.reason = reason
        self.failure_class = failure_class


@dataclass(slots=True)
class Nvml:
    """An open NVML. A question without an answer gives None."""

    library: Any
    """The module `pynvml`, or a fake in tests."""
    unreadable: list[str] = field(default_factory=list)
    """Questions that failed for an unknown reason, with the reason that NVML gave."""

    def ask(self, function: str, *arguments: Any) -> Any:
        """The result of a function; None if this GPU or driver does not have it."""
        asked = getattr(self.library, function, None)
        if asked is None:
            return None
        try:
            return asked(*arguments)
        except self.library.NVMLError as error:
            self._explain(function, error)
            return None

    def number(self, name: str) -> int:
        """A constant, by its name in `nvml.h`."""
        return int(getattr(self.library, name))

    def field(self, gpu: Any, name: str, scope: int = 0) -> int | None:
        """The value of a field, by its name in `nvml.h`; a link's with its number as scope."""
        values: Sequence[Any] | None
        values = self.ask("nvmlDeviceGetFieldValues", gpu, [(self.number(name), scope)])
        if not values or values[0].nvmlReturn != self.number("NVML_SUCCESS"):
            return None
        kind = values[0].valueType
        if not 0 <= kind < len(_UNION_FIELD):
            return None
        return int(getattr(values[0].value, _UNION_FIELD[kind]))

    def struct(self, function: str, gpu: Any, of: str) -> Any:
        """The structure that a function fills, by the structure's name in `pynvml`."""
        made = getattr(self.library, of)()
        return None if self.ask(function, gpu, ctypes.byref(made)) is None else made

    def take_unreadable(self) -> tuple[str, ...]:
        """The questions that failed since the last call."""
        taken = tuple(self.unreadable)
        self.unreadable.clear()
        return taken

    def _explain(self, function: str, error: Any) -> None:
        if error.value == self.number("NVML_ERROR_GPU_IS_LOST"):
            raise GpuGoneError(
                "it is lost: it does not answer on its bus; reboot the node", "reboot"
            ) from error
        if error.value == self.number("NVML_ERROR_RESET_REQUIRED"):
            raise GpuGoneError("it must be reset before it can be used again", "reset") from error
        if error.value not in {self.number(name) for name in _NOT_THERE}:
            self.unreadable.append(f"{function}: {error}")


Load = Callable[[], Any]


def load() -> Any:
    """The module `pynvml`, which only a check imports."""
    return importlib.import_module("pynvml")


@contextmanager
def opened(load: Load) -> Iterator[Nvml]:
    """NVML from its start to its shutdown; raises `NvmlAwayError` if it cannot start."""
    try:
        library = load()
    except ImportError:
        raise NvmlAwayError(
            "unsupported", "nvidia-ml-py is not installed: pip install 'everstep[agent]'"
        ) from None
    nvml = Nvml(library)
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise _away(nvml, error) from error
    try:
        yield nvml
    finally:
        nvml.ask("nvmlShutdown")


def _away(nvml: Nvml, error: Any) -> NvmlAwayError:
    if error.value in {nvml.number(name) for name in _NO_DRIVER}:
        return NvmlAwayError("unsupported", f"no NVIDIA driver on this node: {error}")
    if error.value == nvml.number("NVML_ERROR_LIB_RM_VERSION_MISMATCH"):
        return NvmlAwayError(
            "failed",
            "the NVIDIA driver's library and kernel module are of different releases: reboot the "
            "node, or load the module again",
            "reboot",
        )
    if error.value == nvml.number("NVML_ERROR_GPU_IS_LOST"):
        return NvmlAwayError(
            "failed", "a GPU is lost: it does not answer on its bus; reboot the node", "reboot"
        )
    return NvmlAwayError("unknown", f"NVML could not be opened: {error}")
