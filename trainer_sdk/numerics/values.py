"""The loss and the gradient norm of steps; those on a GPU are read once they have arrived."""

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer_sdk.sdk_log import warn_once


class StepValues(NamedTuple):
    """What a step has computed."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None


class StepReader:
    """Reads the values of steps in their order, without waiting for the device."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self.is_late = False
        """Whether the values of the last step were on a GPU, and arrive while the next is made."""
        self._coming: deque[tuple[int, list[Any], Any, float | None]] = deque()

    def add(self, step: int, loss: Any, grad_norm: Any, lr: float | None) -> None:
        """Take the values of a step; those on a GPU are copied in the background."""
        values = [_scalar("loss", loss), _scalar("grad_norm", grad_norm)]
        event = None
        self.is_late = False
        devices = [value.device for value in values if isinstance(value, Tensor)]
        if devices and not self._waits:
            values = [_copied(value) if isinstance(value, Tensor) else value for value in values]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(devices[0]))
            self.is_late = True
        self._coming.append((step, values, event, lr))

    def arrived(self, *, waits: bool = False) -> list[StepValues]:
        """The values of the steps that have arrived, the oldest first; or those of all steps."""
        arrived = []
        while self._coming:
            step, values, event, lr = self._coming[0]
            if event is not None and waits:
                event.synchronize()
            if event is not None and not event.query():
                break
            self._coming.popleft()
            loss, grad_norm = (None if value is None else float(value) for value in values)
            arrived.append(StepValues(step, loss, grad_norm, lr))
        return arrived

    def forget(self) -> None:
        """Forget what has not arrived: the training has gone back."""
        self._coming.clear()


def _copied(value: Tensor) -> Tensor:
    """A copy in pinned memory, which is complete once the device has come to it."""
    pinned = torch.empty((), dtype=torch.float64, pin_memory=True)
    pinned.copy_(value.reshape(()), non_blocking=True)
    return pinned


def _scalar(name: str, value: Any) -> "float | Tensor | None":
    """A number, or a tensor on a GPU with a single value; None for anything else, after a line."""
    if value is None or isinstance(value, float):
        return value
    try:
        if isinstance(value, Tensor):
            if type(value) is not Tensor and hasattr(value, "full_tensor"):
                value = value.full_tensor()
            if value.is_cuda and value.numel() == 1:
                on_device: Tensor = value.detach()
                return on_device
            value = value.item()
        return float(value)
    except Exception:  # noqa: BLE001 - the training goes on, whatever it has given
        warn_once(f"numerics: {name} must be one number, and is {type(value).__name__}")
        return None
