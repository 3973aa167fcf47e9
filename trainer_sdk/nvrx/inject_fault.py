"""NVRx's `shared_utils.inject_fault`, over `trainer_sdk.inject`: a call allows its fault itself."""

import enum
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from trainer_sdk import inject
from trainer_sdk.environment import environ
from trainer_sdk.inject import InjectedError
from trainer_sdk.sdk_log import warn

Callback = Callable[[], Any] | None
Handler = Callable[[float, Callback], Any]
InjectedException = InjectedError
"""What an injected fault raises."""

_HOLD_S = 86_400.0


class Fault(enum.Enum):
    """NVRx's faults, with its numbers."""

    GPU_ERROR = 1
    GPU_SLEEP = 2
    WORKLOAD_EXC = 3
    ASYNC_EXC = 4
    SIGNAL_EXC = 5
    OS_ABORT = 6
    LOCK_GIL = 7
    SEGFAULT = 8
    SIGINT = 9
    SIGKILL = 10
    SIGTERM = 11
    SIGSTOP = 12


workload_raise_event = threading.Event()
_handlers: dict[Any, Handler] = {}


class OwnFault:
    """A fault of the training's own, by `register_fault`."""

    def __init__(self, name: str) -> None:
        self.name = name


def register_fault(fault_name_or_enum: "str | Fault | OwnFault", handler: Handler) -> Any:
    """Have `handler(delay, callback)` make this fault from now on; returns the fault."""
    fault = (
        OwnFault(fault_name_or_enum) if isinstance(fault_name_or_enum, str) else fault_name_or_enum
    )
    _handlers[fault] = handler
    return fault


def dispatch_fault_injection(fault: Any, delay: float, callback: Callback = None) -> None:
    """Make the fault after `delay` seconds; `callback` is called just before it."""
    if fault in _handlers:
        _handlers[fault](delay, callback)
        return
    if not isinstance(fault, Fault):
        raise RuntimeError(  # noqa: TRY004 - as NVRx
            f"there is no fault {fault!r}: see Fault, or call register_fault first"
        )
    if fault is not Fault.WORKLOAD_EXC and threading.current_thread() is threading.main_thread():
        inject.prepare()
    threading.Thread(
        target=_make_later, args=(fault, delay, callback), name="everstep-fault", daemon=True
    ).start()


def inject_fault(
    faults: Sequence[Fault],
    num_faults: "int | tuple[int, int]",
    keep_alive: int,
    delay: "float | tuple[float, float]",
    seed: int,
    callback: Callback = None,
) -> None:
    """Make one of `faults`, chosen by `seed`, in `num_faults` ranks after a time.

    All ranks call it, also before there is a process group, and choose the same ranks; the first
    `keep_alive` are never chosen.
    """
    rank, size = int(environ.get("RANK") or 0), int(environ.get("WORLD_SIZE") or 1)
    draw = random.Random(seed)  # noqa: S311 - a plan that all ranks can repeat
    number = draw.randint(*num_faults) if isinstance(num_faults, tuple) else num_faults
    ranks = draw.sample(range(keep_alive, size), min(number, max(size - keep_alive, 0)))
    fault = draw.choice(list(faults))
    after_s = draw.uniform(*delay) if isinstance(delay, tuple) else delay
    if not ranks and number and rank == 0:
        warn(
            f"no fault is made: keep_alive {keep_alive} leaves none of {size} ranks to choose from"
        )
    if rank in ranks:
        dispatch_fault_injection(fault, after_s, callback)


def maybe_raise_workload_exception() -> None:
    """Raise, if `WORKLOAD_EXC` is due."""
    if workload_raise_event.is_set():
        workload_raise_event.clear()
        raise InjectedException


def clear_workload_exception() -> None:
    """Forget a `WORKLOAD_EXC` that is due."""
    workload_raise_event.clear()


def _make_later(fault: Fault, delay: float, callback: Callback) -> None:
    time.sleep(delay)
    if callback is not None:
        callback()
    if fault is Fault.WORKLOAD_EXC:
        workload_raise_event.set()
        return
    lasts = _HOLD_S if fault is Fault.GPU_SLEEP else None
    try:
        inject.now(fault.name.lower(), for_s=lasts, allow=True)
    except inject.BadFaultError as error:
        warn(f"the fault {fault.name} was not made: {error}")
