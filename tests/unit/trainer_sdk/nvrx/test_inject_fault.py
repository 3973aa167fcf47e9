"""NVRx's faults are those of `trainer_sdk.inject`, under its names."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from trainer_sdk.nvrx import inject_fault
from trainer_sdk.nvrx.inject_fault import Fault, dispatch_fault_injection

WITHIN_S = 60.0
SCRIPT = """
import sys, threading, time
from trainer_sdk.nvrx.inject_fault import Fault, InjectedException, dispatch_fault_injection
called = threading.Event()
try:
    dispatch_fault_injection(Fault[sys.argv[1]], 0.01, called.set)
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        pass  # it computes, as a training does, until the fault
except InjectedException:
    assert called.is_set()
    sys.exit(42)
except KeyboardInterrupt:
    sys.exit(43)
"""


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("ASYNC_EXC", 42), ("SIGNAL_EXC", 42), ("SIGINT", 43), ("SIGKILL", -signal.SIGKILL),
        ("SIGTERM", -signal.SIGTERM), ("SEGFAULT", -signal.SIGSEGV), ("OS_ABORT", -signal.SIGABRT),
    ],
)  # fmt: skip
def test_a_fault_is_made_after_its_delay(fault: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, fault], check=False, capture_output=True, timeout=WITHIN_S
    )
    assert done.returncode == code, done.stderr.decode()


def test_a_workload_exception_rises_where_the_training_allows_it() -> None:
    called = threading.Event()
    inject_fault.clear_workload_exception()
    inject_fault.maybe_raise_workload_exception()
    dispatch_fault_injection(Fault.WORKLOAD_EXC, 0, called.set)
    assert inject_fault.workload_raise_event.wait(WITHIN_S)
    assert called.is_set()
    with pytest.raises(inject_fault.InjectedException):
        inject_fault.maybe_raise_workload_exception()
    inject_fault.maybe_raise_workload_exception()
    inject_fault.workload_raise_event.set()
    inject_fault.clear_workload_exception()
    inject_fault.maybe_raise_workload_exception()


def test_a_fault_of_ones_own() -> None:
    made: list[object] = []
    own = inject_fault.register_fault("flood", lambda delay, callback: made.append(delay))
    dispatch_fault_injection(own, 3, None)
    assert made == [3]
    with pytest.raises(RuntimeError, match="there is no fault 'x'"):
        dispatch_fault_injection("x", 0, None)


def test_the_numbers_are_those_of_nvrx() -> None:
    """Megatron-Core sends a fault to other ranks as its number."""
    assert [Fault(number).name for number in range(1, 13)] == [
        "GPU_ERROR", "GPU_SLEEP", "WORKLOAD_EXC", "ASYNC_EXC", "SIGNAL_EXC", "OS_ABORT",
        "LOCK_GIL", "SEGFAULT", "SIGINT", "SIGKILL", "SIGTERM", "SIGSTOP",
    ]  # fmt: skip


def test_ranks_are_chosen_before_there_is_a_process_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RANK and WORLD_SIZE say it, as with NVRx."""
    made: list[int] = []
    inject_fault.register_fault(
        Fault.SIGKILL, lambda delay, callback: made.append(int(os.environ["RANK"]))
    )
    monkeypatch.setenv("WORLD_SIZE", "8")
    try:
        for rank in range(8):
            monkeypatch.setenv("RANK", str(rank))
            inject_fault.inject_fault((Fault.SIGKILL,), 2, keep_alive=5, delay=0.0, seed=7)
            inject_fault.inject_fault((Fault.SIGKILL,), 2, keep_alive=8, delay=0.0, seed=7)
    finally:
        inject_fault._handlers.clear()
    assert len(made) == 2
    assert set(made) < {5, 6, 7}
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "everstep: no fault is made: keep_alive 8 leaves none of 8 ranks to choose from"


def test_inject_fault_chooses_by_its_seed() -> None:
    made: list[float] = []
    for fault in (Fault.GPU_ERROR, Fault.SIGKILL):
        inject_fault.register_fault(fault, lambda delay, callback: made.append(delay))
    try:
        for _ in range(2):
            inject_fault.inject_fault(
                (Fault.GPU_ERROR, Fault.SIGKILL), (1, 1), 0, (1.0, 2.0), seed=7
            )
        inject_fault.inject_fault((Fault.SIGKILL,), 1, keep_alive=1, delay=0.0, seed=7)
    finally:
        inject_fault._handlers.clear()
    assert len(made) == 2
    assert made[0] == made[1]
    assert 1 <= made[0] <= 2
