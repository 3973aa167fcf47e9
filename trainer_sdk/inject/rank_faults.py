"""The faults that a process makes in itself; each may be made from any thread."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never, get_args

from trainer_sdk import layout
from trainer_sdk.environment import environ
from trainer_sdk.inject.catalog import BadFaultError, FaultRequest, NumericFault

_SIGNAL = signal.SIGRTMAX - 1

_waiting: deque[Callable[[], None]] = deque()


def take_signal() -> None:
    """Set the handler; called once, in the main thread, as only that may set handlers."""
    signal.signal(_SIGNAL, _handle)
    signal.siginterrupt(_SIGNAL, False)  # noqa: FBT003 - positional only


def in_main_thread(act: Callable[[], None]) -> None:
    """Run `act` in the main thread, between two instructions of the script; its errors rise there.

    If the main thread is outside of Python, `act` runs when it returns.
    """
    _waiting.append(act)
    ident = threading.main_thread().ident
    assert ident is not None, "the main thread has begun"
    signal.pthread_kill(ident, _SIGNAL)


def _handle(*_: object) -> None:
    while _waiting:
        _waiting.popleft()()


_FOR_EVER_S = 10 * 365 * 86400.0
_LOOK_EVERY_S = 0.001
_GROW_EVERY_S = 0.05
_MB = 1 << 20
_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000
_STACK_BYTES = 1 << 16
_CYCLES_A_SECOND = 1.5e9

PageWords = Callable[[], "memoryview[int]"]
"""The page of this process."""


class InjectedError(RuntimeError):
    """Raised on purpose, as an injected fault."""

    def __init__(self, text: str = "a fault that was injected on purpose") -> None:
        super().__init__(text)


def check(wish: FaultRequest) -> None:
    """`BadFaultError` if this process cannot make this fault."""
    name = wish.fault.name
    if wish.fault.place == "agent":
        raise BadFaultError(f"{name} is made by an agent: use `everstep inject {name}`")
    if name in {"exception", "stall"}:
        session = sys.modules.get("trainer_sdk.rank_session")
        if session is None or session._own is None:  # noqa: SLF001 - `session()` would open one
            raise BadFaultError(
                f"{name} needs a script that has opened its session (trainer_sdk.session()); "
                f"without a session, use async_exception or hang"
            )
    if name in get_args(NumericFault) and "torch" not in sys.modules:
        raise BadFaultError(f"{name} needs a process that uses torch: this one does not")
    if name in {"gpu_sleep", "gpu_error"}:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            raise BadFaultError(f"{name} needs a process that uses CUDA: this one does not")


def make(wish: FaultRequest, words: PageWords) -> None:  # noqa: C901, PLR0912, PLR0915  a table
    """Make the fault, and return unless it ends the process; it ends by itself after its time."""
    for_s = _FOR_EVER_S if wish.for_s is None else wish.for_s
    match wish.fault.name:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        case "exception" | "stall":
            _at_session(wish, for_s)
        case "async_exception":
            _raise_in_main_thread()
        case "signal_exception":
            in_main_thread(_raise)
        case "abort":
            os.abort()
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(wish.amount)
        case "hang":
            in_main_thread(lambda: time.sleep(for_s))
        case "stuck":
            in_main_thread(lambda: _wait_in_kernel(for_s))
        case "hold_gil":
            _hold_gil(for_s)
        case "slow":
            _in_thread(_slow, words, wish.amount / 1000, for_s)
        case "memory_leak":
            _in_thread(_grow, wish.amount, for_s)
        case "gpu_sleep" | "gpu_error":
            _harm_gpu(wish.fault.name, for_s)
        case (
            "flip_parameter" | "flip_gradient" | "flip_reduced_gradient" | "flip_activation"
            | "scale_activation" | "nan_activation" | "poison_batch"
        ):  # fmt: skip
            from trainer_sdk.inject import numeric_faults  # imports torch

            in_main_thread(lambda: numeric_faults.make(wish))
        case "stop":
            _stop(wish.for_s)
        case "kill_agent" | "clock_skew" | "disk_full" | "cut_off" | "partition" | "slow_link":
            raise AssertionError("`check` refuses the faults of agents")
        case _:
            assert_never(wish.fault.name)


def _raise() -> None:
    raise InjectedError


def _at_session(wish: FaultRequest, for_s: float) -> None:
    from trainer_sdk.inject import session_hooks  # a script without a session does not need it

    if wish.target:
        session_hooks.inside_next(wish.target, lambda: time.sleep(for_s))
    else:
        session_hooks.before_next(_raise)


def _raise_in_main_thread() -> None:
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident or 0), ctypes.py_object(InjectedError)
    )


def _in_thread(target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name="everstep-fault", daemon=True).start()


def _slow(words: PageWords, by_s: float, for_s: float) -> None:
    ends, made = time.monotonic() + for_s, words()[layout.STEP]
    while time.monotonic() < ends:
        now = words()[layout.STEP]
        if now != made:
            made = now
            in_main_thread(lambda: time.sleep(by_s))
        time.sleep(_LOOK_EVERY_S)


class _Span(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _hold_gil(for_s: float) -> None:
    """Sleep in C without releasing the GIL; after a signal, sleep for the rest."""
    wait = ctypes.PyDLL(None).nanosleep
    left = _Span(int(for_s), int(for_s % 1 * 1e9))
    while wait(ctypes.byref(left), ctypes.byref(left)):
        pass


def _wait_in_kernel(for_s: float) -> None:
    """Wait as a parent does in vfork: uninterruptibly, until a child that shares its memory ends.

    The child only runs C's `sleep`, on a separate stack. SIGKILL ends the wait.
    """
    libc = ctypes.CDLL(None)
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = (ctypes.addressof(stack) + _STACK_BYTES) & ~15
    flags = _CLONE_VM | _CLONE_VFORK | signal.SIGCHLD
    child = libc.clone(
        ctypes.cast(libc.sleep, ctypes.c_void_p),
        ctypes.c_void_p(top),
        ctypes.c_int(flags),
        ctypes.c_void_p(max(1, round(for_s))),
    )
    if child > 0:
        os.waitpid(child, 0)


def _grow(mb_a_second: int, for_s: float) -> None:
    ends, began = time.monotonic() + for_s, time.monotonic()
    most = _free_mb() // 2
    leaked: list[bytes] = []
    while (now := time.monotonic()) < ends:
        while len(leaked) < min(most, mb_a_second * (now - began)):
            leaked.append(b"\1" * _MB)  # pages of zeros alone would take no memory
        time.sleep(_GROW_EVERY_S)


def _free_mb() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvail")) // 1024


def _stop(for_s: float | None) -> None:
    """Stop this process; another process wakes it up after the time."""
    rank = os.getpid()
    if for_s is not None:
        words = ["sh", "-c", f"sleep {for_s:g}; kill -CONT {rank}"]
        os.posix_spawnp("sh", words, environ)  # the rank's environment
    os.kill(rank, signal.SIGSTOP)


def _harm_gpu(name: str, for_s: float) -> None:
    torch = sys.modules["torch"]
    if name == "gpu_sleep":
        torch.cuda._sleep(int(for_s * _CYCLES_A_SECOND))  # noqa: SLF001 - torch's own, for tests
    else:
        torch._assert_async(torch.zeros(1, dtype=torch.bool, device="cuda"))  # noqa: SLF001
