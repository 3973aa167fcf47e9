"""For tests: a writer that is killed at one point of all that could be durable or not."""

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

KILL_AT = "EVERSTEP_CHECKPOINT_KILL_AT"
_POINTS = ("open", "write", "pwrite", "fsync", "link", "rename", "replace", "unlink", "rmdir")


def arm(environ: Mapping[str, str]) -> None:
    """Have this process killed before its n-th such call, if the environment says so."""
    if KILL_AT not in environ:
        return
    counter, last = itertools.count(1), int(environ[KILL_AT])
    for name in _POINTS:
        setattr(os, name, _counted(getattr(os, name), counter, last))


def _counted(call: Callable[..., Any], counter: "itertools.count[int]", last: int) -> Any:
    def counted(*arguments: Any, **named: Any) -> Any:
        if next(counter) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    return counted
