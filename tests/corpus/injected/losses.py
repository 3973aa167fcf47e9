"""Ranks that others lose: they die, are killed, stopped or cut off."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading

from tests.corpus.injected.registry import Training, fault


@fault("dead_peer", "metrics")
def exits_at_once(training: Training) -> None:
    """A rank is gone without a word."""
    os._exit(1)


@fault("dead_peer", "metrics")
def ends_as_if_done(training: Training) -> None:
    """A rank ends well in the middle of the training."""
    os._exit(0)


@fault("dead_peer", "metrics")
def stopped(training: Training) -> None:
    """A rank is stopped, as a frozen host stops it: its connections stay open."""
    os.kill(os.getpid(), signal.SIGSTOP)


@fault("dead_peer", "metrics")
def loses_connections(training: Training) -> None:
    """A rank's connections end, and it goes on."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held = socket.socket(fileno=os.dup(int(entry)))
            if held.family != socket.AF_UNIX:
                held.shutdown(socket.SHUT_RDWR)
    training.metrics()


@fault("dead_peer", "save")
def aborts(training: Training) -> None:
    """A rank is ended by SIGABRT."""
    os.abort()


@fault("sigkill", "metrics")
def killed_in_a_step(training: Training) -> None:
    """SIGKILL between backward and the metrics."""
    os.kill(os.getpid(), signal.SIGKILL)


@fault("sigkill", "load")
def killed_while_loading(training: Training) -> None:
    """SIGKILL while a batch is loaded."""
    os.kill(os.getpid(), signal.SIGKILL)


@fault("sigkill", "save")
def killed_while_saving(training: Training) -> None:
    """SIGKILL while a checkpoint is written."""
    with (training.folder / "partial.pt").open("wb") as file:
        file.write(bytes(1000))
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


@fault("sigkill", "forward")
def killed_from_outside(training: Training) -> None:
    """A child process kills the rank while it computes."""
    subprocess.Popen(["/bin/kill", "-9", str(os.getpid())])
    while True:
        training.forward()


@fault("sigkill", "start")
def killed_early(training: Training) -> None:
    """SIGKILL before the process group is there."""
    os.kill(os.getpid(), signal.SIGKILL)


@fault("segfault", "forward")
def reads_null(training: Training) -> None:
    """A null pointer is read."""
    ctypes.string_at(0)


@fault("segfault", "backward")
def writes_null(training: Training) -> None:
    """A null pointer is written."""
    ctypes.memset(0, 1, 8)


@fault("segfault", "load")
def calls_nonsense(training: Training) -> None:
    """A function is called at an address where none is."""
    ctypes.CFUNCTYPE(None)(16)()


@fault("segfault", "optimize")
def signals_itself(training: Training) -> None:
    """SIGSEGV from outside of the rank's own code."""
    os.kill(os.getpid(), signal.SIGSEGV)


@fault("segfault", "save")
def in_a_thread(training: Training) -> None:
    """A thread of the rank reads a null pointer, while the main thread waits."""
    thread = threading.Thread(target=ctypes.string_at, args=(0,))
    thread.start()
    thread.join()


def _cancelled(reason: str) -> None:
    print(f"slurmstepd: error: *** STEP 4711.0 ON node-3 CANCELLED {reason} ***", file=sys.stderr)
    sys.stderr.flush()


@fault("preempted", "metrics", everywhere=True)
def preempted(training: Training) -> None:
    """The scheduler wants the node, announces it, and ends all ranks."""
    _cancelled("AT 2026-11-02T03:11:11 DUE TO PREEMPTION")
    os.kill(os.getpid(), signal.SIGTERM)


@fault("preempted", "load", everywhere=True)
def preempted_hard(training: Training) -> None:
    """The grace is over."""
    _cancelled("AT 2026-11-02T03:11:11 DUE TO PREEMPTION")
    os.kill(os.getpid(), signal.SIGKILL)


@fault("preempted", "metrics", everywhere=True)
def time_limit(training: Training) -> None:
    """The job's time is over."""
    _cancelled("AT 2026-11-02T03:11:11 DUE TO TIME LIMIT")
    os.kill(os.getpid(), signal.SIGTERM)


@fault("preempted", "save", everywhere=True)
def cancelled(training: Training) -> None:
    """Somebody cancels the job."""
    _cancelled("AT 2026-11-02T03:11:11")
    os.kill(os.getpid(), signal.SIGTERM)


@fault("preempted", "forward", everywhere=True)
def interrupted(training: Training) -> None:
    """SIGTERM, and the script ends by itself with 143."""
    _cancelled("AT 2026-11-02T03:11:11 DUE TO PREEMPTION")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)
