"""What ranks of the truth's trainings do wrong that the corpus does not have."""

import os
import sys
import time
from collections.abc import Callable

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


def _reduces_doubles(training: Training) -> None:
    """One rank reduces as many numbers as the others, of another type."""
    import torch
    import torch.distributed as dist

    dtype = torch.float64 if training.is_culprit else torch.float32
    dist.all_reduce(torch.ones(1000, dtype=dtype), group=training.metrics_group)


_OWN = {
    ("wrong_type", 0): Injection("metrics", _reduces_doubles, runs_everywhere=True),
    ("slow", 0): Injection("prepare", _slows, runs_everywhere=False),
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
