"""Keeps the workers of a rank's data loaders alive when all processes get a signal.

If a worker dies, its loader raises in the rank, which then cannot save. Torch's own workers end at
any SIGTERM; guarded workers end when their loader ends them, when the rank is gone, or by SIGKILL.
"""

import signal
import sys
from contextlib import suppress
from typing import Any

from trainer_sdk.bootstrap import deferred_signals

_GUARDED = "_everstep_ignores_signals"
_WORKERS = ("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.worker")
"""The modules with a `_worker_loop` that has torch prepare the worker."""


def guard() -> None:
    """Change how torch prepares workers and ends them; its module for that is loaded already."""
    from multiprocessing import popen_fork, process, util  # torch has imported them

    handling: Any = sys.modules["torch.utils.data._utils.signal_handling"]
    prepare = handling._set_worker_signal_handlers  # noqa: SLF001
    parts: Any = popen_fork.Popen
    launch, terminate = parts._launch, parts.terminate  # noqa: SLF001

    def prepare_worker() -> None:
        prepare()
        if deferred_signals.is_held():  # else its loader ends it by SIGTERM
            deferred_signals.ignore_in_child()

    def launched(popen: Any, child: process.BaseProcess) -> None:
        if not _is_worker(getattr(child, "_target", None)):
            launch(popen, child)
            return
        setattr(popen, _GUARDED, True)
        deferred_signals.forking(lambda: launch(popen, child))

    def end(popen: Any) -> None:
        if not hasattr(popen, _GUARDED):
            terminate(popen)
            return
        if util.is_exiting():  # else torch's handler takes this end for a failure, and raises
            with suppress(ValueError):  # in another thread than the main one
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        popen.kill()

    handling._set_worker_signal_handlers = prepare_worker  # noqa: SLF001
    parts._launch, parts.terminate = launched, end  # noqa: SLF001


def _is_worker(target: object) -> bool:
    is_loop = getattr(target, "__name__", "") == "_worker_loop"
    return is_loop and getattr(target, "__module__", "") in _WORKERS
