"""The loss and the norms of steps; those on a GPU are read once they have arrived."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer_sdk.numerics.replay import square_sum
from trainer_sdk.numerics.snapshot import local
from trainer_sdk.sdk_log import warn_once


class StepValues(msgspec.Struct, frozen=True):
    """What a step has computed."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float | None
    output: float | None = None
    """The norm of what the model has returned."""


class StepReader:
    """Reads the values of steps in their order, without waiting for the device."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self.is_late = False
        """Whether the values of the last step were on a GPU, and arrive while the next is made."""
        self._coming: deque[tuple[int, list[Any], list[Any], float | None]] = deque()

    def read(
        self, step: int, loss: Any, grad_norm: Any, lr: float | None, output: Any = None
    ) -> list[StepValues]:
        """Take the values of a step; return those of the steps that have arrived."""
        if type(loss) is Tensor and loss.is_cpu and loss.numel() == 1:
            loss = loss.item()
        if type(grad_norm) is Tensor and grad_norm.is_cpu and grad_norm.numel() == 1:
            grad_norm = grad_norm.item()
        if type(loss) is not float:
            loss = _scalar("loss", loss)
        if type(grad_norm) is not float:
            grad_norm = _scalar("grad_norm", grad_norm)
        if output is not None:
            output = _scalar("output", output)
        is_on_device = (
            isinstance(loss, Tensor) or isinstance(grad_norm, Tensor) or isinstance(output, Tensor)
        )
        if is_on_device or self._coming:
            self._add(step, [loss, grad_norm, output], lr)
            return self.arrived()
        self.is_late = False
        return [StepValues(step, loss, grad_norm, lr, output)]

    def _add(self, step: int, values: list[Any], lr: float | None) -> None:
        """Keep the values of a step; those on a GPU are copied in the background."""
        devices = {value.device for value in values if isinstance(value, Tensor)}
        self.is_late = bool(devices) and not self._waits
        if self.is_late:
            values = [_copied(value) if isinstance(value, Tensor) else value for value in values]
        events = [_recorded(device) for device in devices if self.is_late]
        self._coming.append((step, values, events, lr))

    def arrived(self, *, waits: bool = False) -> list[StepValues]:
        """The values of the steps that have arrived, the oldest first; or those of all steps."""
        arrived = []
        while self._coming:
            step, values, events, lr = self._coming[0]
            for event in events if waits else ():
                event.synchronize()
            if not all(event.query() for event in events):
                break
            self._coming.popleft()
            loss, grad_norm, output = (None if value is None else float(value) for value in values)
            arrived.append(StepValues(step, loss, grad_norm, lr, output))
        return arrived

    def forget(self) -> None:
        """Forget what has not arrived: the training has gone back."""
        self._coming.clear()


class OutputNorm:
    """The norm of what the model returns, for a rank that has no loss to look at.

    A stage of a pipeline hands wrong values on, and the loss and the gradients of others, which
    are noisier, may hide them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self.is_watched = False
        """Whether the model has hooks for it."""
        self.is_open = False
        """Whether the model computes the step for the first time."""
        self._squares: Tensor | None = None

    def taken(self, *, is_wanted: bool) -> Tensor | None:
        """The norm over all calls of the step; None where it was not wanted before."""
        if is_wanted and self.is_open and not self.is_watched:
            self.is_watched = True
            for module in self._modules:
                if module._compiled_call_impl is None:  # noqa: SLF001 - a hook would compile anew
                    module.register_forward_hook(self._see)
        self.is_open = False
        squares, self._squares = self._squares, None
        return squares.sqrt() if is_wanted and squares is not None else None

    def _see(self, _module: nn.Module, _inputs: object, result: Any) -> None:
        if self.is_open and torch.is_grad_enabled():
            with torch.no_grad():
                for value in pytree.tree_leaves(result):
                    if _has_norm(value):
                        square = square_sum(local(value))
                        self._squares = square if self._squares is None else self._squares + square
                        return


def _has_norm(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided


def _copied(value: Tensor) -> Tensor:
    """A copy in pinned memory, which is complete once the device has come to it."""
    pinned = torch.empty((), dtype=torch.float64, pin_memory=True)
    pinned.copy_(value.reshape(()), non_blocking=True)
    return pinned


def _recorded(device: torch.device) -> Any:
    """An event that is over once the device has come to it."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


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


class LateMetrics:
    """Reports the newest values by name, without waiting for the device.

    While those of an earlier step are on their way, newer ones on a GPU are passed over.
    """

    def __init__(self, report: Callable[[str, float], None]) -> None:
        self._report = report
        self._coming: dict[str, Tensor] = {}
        self._events: list[Any] = []

    def show(self, values: Mapping[str, Any]) -> None:
        """Report the values of a step that are on the host, and what has arrived from a GPU."""
        late = {name: value for name, value in values.items() if getattr(value, "is_cuda", False)}
        if all(event.query() for event in self._events):
            for name, value in self._coming.items():
                self._report(name, float(value))
            self._coming = {name: _copied(value.detach()) for name, value in late.items()}
            self._events = [_recorded(device) for device in {each.device for each in late.values()}]
        for name, value in values.items():
            if name not in late:
                self._report(name, float(value))
