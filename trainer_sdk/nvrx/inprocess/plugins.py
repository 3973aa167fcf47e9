"""The plugins of `Wrapper`: what is called at the start, at the end and between two iterations."""

import abc
import datetime
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer_sdk.environment import environ
from trainer_sdk.nvrx.async_calls import abort_nvrx_checkpoint
from trainer_sdk.nvrx.inprocess.state import (
    FrozenState,
    HealthCheckError,
    RestartAbort,
    RestartError,
    TimeoutError,
)
from trainer_sdk.survive.group_abort import abort_group, abort_groups

_DEVICE_WITHIN = datetime.timedelta(seconds=30)


class _Plugin(abc.ABC):
    """A function of the state, which returns the state."""

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Act; returns the state."""


class Initialize(_Plugin):
    """Called before the function in each iteration.

    An `Exception` begins another restart; a `BaseException` ends the training on this rank.
    """


class Abort(_Plugin):
    """Called in another thread when the function must end: it releases a rank that waits."""


class Finalize(_Plugin):
    """Called after the function was interrupted; an exception ends the training on this rank."""


class HealthCheck(_Plugin):
    """Called before the function and after `Finalize`; an exception excludes this rank."""


class Completion(_Plugin):
    """Called when all ranks have completed the function."""


class Terminate(_Plugin):
    """Called when the training ends on this rank without success."""


class RetryController(Initialize):
    """Limits the number of iterations, and sets the least numbers of ranks."""

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise `RestartAbort` past a limit."""
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(
                f"iteration {state.iteration} would exceed max_iterations={self.max_iterations}"
            )
        if state.world_size < self.min_world_size:
            raise RestartAbort(
                f"{state.world_size} ranks are left, and min_world_size is {self.min_world_size}"
            )
        if (state.active_world_size or 0) < self.min_active_world_size:
            raise RestartAbort(
                f"{state.active_world_size} ranks are active, and min_active_world_size is "
                f"{self.min_active_world_size}"
            )
        return state


class AbortTorchDistributed(Abort):
    """Aborts all process groups, and destroys them: NCCL by its abort, gloo by its connections."""

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        self.torch_fr_trace_path = torch_fr_trace_path
        """Without effect: the agent collects the flight recorders of all ranks."""

    @staticmethod
    def shutdown_all_process_group_backends() -> None:
        """Abort every group of this process."""
        abort_groups(is_last=False)

    @staticmethod
    def shutdown_process_group_backend(group: Any, device: torch.device) -> None:
        """Abort one group."""
        abort_group(group, device)

    def collect_fr_trace(self, state: FrozenState) -> None:
        """Do nothing: the agent collects the flight recorders."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Abort and destroy."""
        abort_groups(is_last=True)
        return state


class AbortTransformerEngine(Abort):
    """Releases Transformer Engine's user buffers and its process group, where it is installed."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Release what is there."""
        try:
            from transformer_engine.pytorch.module import base

            base.destroy_ub()
        except Exception:  # noqa: BLE001, S110 - not installed, or not in use
            pass
        try:
            from transformer_engine.pytorch import fp8

            fp8.FP8GlobalStateManager.reset()
        except Exception:  # noqa: BLE001, S110 - not installed, or not in use
            pass
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Abandons the asynchronous saves of every queue."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Abandon them."""
        abort_nvrx_checkpoint()
        return state


class ThreadedFinalize(Finalize):
    """Calls a function in a thread; `TimeoutError` if it takes longer than `timeout`."""

    def __init__(
        self,
        timeout: datetime.timedelta,
        fn: Callable[..., Any],
        args: "Sequence[Any] | None" = (),
        kwargs: "Mapping[str, Any] | None" = None,
    ) -> None:
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        """Call the function on the rank's device, if it has one."""
        device = _device()

        def work() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        _within(self.timeout, work, f"{type(self).__name__} of {self.fn!r}")
        return state


class CudaHealthCheck(HealthCheck):
    """Waits for this rank's GPU; `TimeoutError` if that takes longer than `timeout`."""

    def __init__(self, timeout: datetime.timedelta = _DEVICE_WITHIN) -> None:
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """Synchronize twice: the second call shows whether the context is still usable."""
        device = _device()
        if device is not None:
            _within(self.timeout, lambda: torch.cuda.synchronize(device), "the GPU")
            torch.cuda.synchronize(device)
        return state


class FaultCounterExceeded(RestartError):  # noqa: N818 - NVRx's name
    """The rank has raised more exceptions than allowed."""


class FaultCounter(HealthCheck):
    """Counts the exceptions of the function on this rank, and excludes the rank past a limit."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise `FaultCounterExceeded` past the limit."""
        if state.fn_exception is not None:
            self.faults_count += 1
            if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
                raise FaultCounterExceeded(
                    f"rank {state.initial_rank} has failed {self.faults_count} times, and "
                    f"max_rank_faults is {self.max_rank_faults}"
                )
        return state


def _device() -> "torch.device | None":
    if not torch.cuda.is_available():
        return None
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    local = environ.get("LOCAL_RANK", "")
    return torch.device("cuda", int(local) if local.isdecimal() else torch.cuda.current_device())


def _within(timeout: datetime.timedelta, work: Callable[[], None], name: str) -> None:
    """Do it in a thread, and raise what it raises."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            failures.append(error)

    thread = threading.Thread(target=run, name="everstep-plugin", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if thread.is_alive():
        raise TimeoutError(f"{name} was not done after {timeout.total_seconds():g} s")
    if failures:
        raise failures[0]


__all__ = [
    "Abort",
    "AbortPersistentCheckpointProcesses",
    "AbortTorchDistributed",
    "AbortTransformerEngine",
    "Completion",
    "CudaHealthCheck",
    "FaultCounter",
    "FaultCounterExceeded",
    "Finalize",
    "HealthCheck",
    "HealthCheckError",
    "Initialize",
    "RetryController",
    "Terminate",
    "ThreadedFinalize",
]
