"""What ranks of the truth's trainings do wrong that the corpus does not have."""

import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.corpus.injected.registry import Injection, Training, injections

_SLOWER_S = 0.2


def _exits(code: object) -> Callable[[Training], None]:
    def run(_: Training) -> None:
        sys.exit(code)  # type: ignore[arg-type]

    return run


def _imports_nothing(_: Training) -> None:
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def _raises_late(_: Training) -> None:
    raise ValueError("expected 8 classes, found 9")


def _slows(training: Training) -> None:
    """Each forward pass takes longer from now on."""
    usual = training.forward

    def slow() -> None:
        time.sleep(_SLOWER_S)
        usual()

    training.forward = slow  # type: ignore[method-assign]


def _stages(fault: str) -> Callable[[Training], None]:
    """Each forward pass hands numbers from rank to rank; the culprit harms one of these passes."""

    def prepare(training: Training) -> None:
        usual = training.forward

        def forward() -> None:
            import torch
            import torch.distributed as dist

            rank, numbers = training.rank, torch.zeros(64)
            is_now = training.is_culprit and training.step == training.at
            if is_now:
                training.tell("fault in forward")
            if is_now and fault == "sleeps":
                time.sleep(600)
            if rank > 0:
                dist.recv(numbers, src=rank - 1)
            if rank < training.world - 1 and not (is_now and fault == "sends nothing"):
                dist.send(numbers, dst=rank + 1)
            usual()

        training.forward = forward  # type: ignore[method-assign]

    return prepare


def _reduces_doubles(training: Training) -> None:
    """One rank reduces as many numbers as the others, of another type."""
    import torch
    import torch.distributed as dist

    dtype = torch.float64 if training.is_culprit else torch.float32
    dist.all_reduce(torch.ones(1000, dtype=dtype), group=training.metrics_group)


def _reduces_integers(training: Training) -> None:
    """As many bytes of another type: gloo adds them up, and notices nothing."""
    import torch
    import torch.distributed as dist

    dtype = torch.int32 if training.is_culprit else torch.float32
    dist.all_reduce(torch.ones(1000, dtype=dtype), group=training.metrics_group)


def _closes_stdout(training: Training) -> None:
    os.close(1)
    training.forward()


def _opens_files(_: Training) -> None:
    """Until no descriptor is left."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    kept = [open(os.devnull, "rb") for _ in range(1000)]  # noqa: SIM115 - they are to stay open
    kept.clear()


def _leaves_a_child(_: Training) -> None:
    """A child of a session of its own has all sockets; its parent is killed."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _loses_a_worker(training: Training) -> None:
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(list(range(10_000)), num_workers=1))  # type: ignore[arg-type]
    next(batches)
    os.kill(batches._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    for _ in batches:
        pass


def _fails_in_a_hook(training: Training) -> None:
    def raises(_: object) -> None:
        raise ValueError("gradient of another layer")

    next(training.net.parameters()).register_hook(raises)
    training.forward()


def _recurses(training: Training) -> None:
    _recurses(training)


def _locks_itself(_: Training) -> None:
    """Two threads, each of which has what the other waits for."""
    first, second, has_both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def takes(own: threading.Lock, other: threading.Lock) -> None:
        with own:
            has_both.wait()
            other.acquire()

    threading.Thread(target=takes, args=(second, first), daemon=True).start()
    takes(first, second)


def _sets_clocks_back(training: Training) -> None:
    usual, steady = time.time, time.monotonic
    time.time = lambda: usual() - 7200
    time.monotonic = lambda: steady() - 7200
    training.forward()


def _ignores_sigterm(training: Training) -> None:
    """One rank does not end when it is asked to; the one before it is killed."""
    if training.rank == training.neighbour:
        signal.signal(signal.SIGTERM, lambda *_: None)
    if training.is_culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    training.forward()


def _removes_its_folder(training: Training) -> None:
    found = [Path(value) for name, value in os.environ.items() if name.startswith("EVERSTEP_")]
    for folder in {path.parent for path in found if path.is_absolute() and path.is_file()}:
        shutil.rmtree(folder, ignore_errors=True)
    training.forward()


def _interrupts_itself(_: Training) -> None:
    raise KeyboardInterrupt


_OWN = {
    ("wrong_type", 1): Injection("metrics", _reduces_integers, runs_everywhere=True),
    ("stdout_closed", 0): Injection("forward", _closes_stdout, runs_everywhere=False),
    ("files", 0): Injection("load", _opens_files, runs_everywhere=False),
    ("child", 0): Injection("forward", _leaves_a_child, runs_everywhere=False),
    ("worker", 0): Injection("load", _loses_a_worker, runs_everywhere=False),
    ("hook", 0): Injection("forward", _fails_in_a_hook, runs_everywhere=False),
    ("recursion", 0): Injection("forward", _recurses, runs_everywhere=False),
    ("deadlock", 0): Injection("forward", _locks_itself, runs_everywhere=False),
    ("clocks", 0): Injection("forward", _sets_clocks_back, runs_everywhere=False),
    ("no_sigterm", 0): Injection("forward", _ignores_sigterm, runs_everywhere=True),
    ("folder", 0): Injection("forward", _removes_its_folder, runs_everywhere=False),
    ("keyboard", 0): Injection("forward", _interrupts_itself, runs_everywhere=False),
    ("exit", 7): Injection("forward", lambda _: os._exit(0), runs_everywhere=False),
    ("wrong_type", 0): Injection("metrics", _reduces_doubles, runs_everywhere=True),
    ("slow", 0): Injection("prepare", _slows, runs_everywhere=False),
    ("stages", 0): Injection("prepare", _stages("sends nothing"), runs_everywhere=True),
    ("stages", 1): Injection("prepare", _stages("sleeps"), runs_everywhere=True),
    ("exit", 0): Injection("forward", _exits(0), runs_everywhere=False),
    ("exit", 3): Injection("forward", _exits(3), runs_everywhere=False),
    ("exit", 9): Injection("forward", _exits("no more data"), runs_everywhere=False),
    ("import", 0): Injection("start", _imports_nothing, runs_everywhere=True),
    ("import", 1): Injection("start", _imports_nothing, runs_everywhere=False),
    ("same_error", 0): Injection("forward", _raises_late, runs_everywhere=True),
    ("abort", 0): Injection("load", lambda _: os.abort(), runs_everywhere=False),
}


def injection(name: str, variant: int) -> Injection | None:
    """A fault of our own, or of the corpus; None for a healthy training."""
    return {**injections(), **_OWN}.get((name, variant))
