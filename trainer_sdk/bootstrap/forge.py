"""The forge: a process that has imported torch, and forks ranks from it.

A rank that is forked here differs from one that was started afresh, in ways that we know of:

- `PYTHONHASHSEED` unset: fresh processes have a seed each, those forked share the forge's.
- `/proc/PID/environ` shows the forge's environment; the rank itself has its own, in Python and C.
- `sys.flags` are the forge's. Variables that Python or the loader read at their start (`PYTHON…`,
  `LD_…`) therefore have to be the same: the warden starts ranks cold if they are not. Modules that
  read at their import what each rank has for itself are left to the ranks: see `imports`.
- Files that an import has opened stay open, shared with the other ranks of the round.
"""

import gc
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, MutableMapping
from typing import Any

from trainer_sdk.bootstrap import process_setup, process_title
from trainer_sdk.bootstrap.deferred_signals import HELD
from trainer_sdk.bootstrap.import_watch import ImportWatch
from trainer_sdk.bootstrap.preload import preload, why_unsafe
from trainer_sdk.bootstrap.thread_counts import restore_threads
from trainer_sdk.wire import (
    Channel,
    ForgePlan,
    ForgeUp,
    Fork,
    Forked,
    RankCommand,
    RankEntry,
    ToForge,
    Unfit,
    unpack,
)

_DEAF_TO = (*HELD, signal.SIGQUIT)
_FAILED = 1


def main(descriptor: int, environ: MutableMapping[str, str]) -> RankCommand | None:
    """Serve as a forge until the warden is gone.

    Returns None then, and in each rank that is forked: what it has to run. So a rank's script
    runs near the bottom of the stack, with nothing of the forge below it.
    """
    wire = socket.socket(fileno=descriptor)
    channel: Channel[ForgePlan | Fork] = Channel(wire, ToForge)
    began = time.monotonic()
    plan = channel.receive_first()
    assert isinstance(plan, ForgePlan), "the warden's first line"
    # Whoever signals a whole job means its ranks. Blocked, not ignored: a rank that has just been
    # forked gets what was sent to it as soon as it is armed.
    signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)
    process_setup.die_with(plan.warden, born_of=plan.warden)
    os.chdir(plan.cwd)
    imports = ImportWatch(plan.own, environ)
    done = preload(plan, imports)
    gc.collect()
    gc.freeze()  # so that no collection in a rank writes to the pages that all share
    if done.unfit is not None:
        channel.send(done.unfit)
        return None
    took_s = time.monotonic() - began
    channel.send(ForgeUp(took_s=took_s, preloaded=tuple(done.names), failed=tuple(done.failed)))
    entry = _serve(channel, plan, imports)
    if entry is None:
        return None
    _become(entry, plan, environ, imports)
    for warned in done.warned:
        warnings._showwarnmsg(warned)  # type: ignore[attr-defined]  # noqa: SLF001
    return plan.command


def _serve(
    channel: "Channel[ForgePlan | Fork]", plan: ForgePlan, imports: ImportWatch
) -> RankEntry | None:
    for request in _requests(channel):
        unfit = _why_not(request, imports)
        if unfit is not None:
            channel.send(unfit)
            continue
        born = _fork(request, channel)
        if born is not None:
            channel.close()
            process_setup.die_with(plan.warden, born_of=born.parent)
            return born.entry
    return None


def _why_not(request: Fork, imports: ImportWatch) -> Unfit | None:
    if reason := why_unsafe():
        return Unfit(reason=reason)
    verdicts = (imports.why_unfit(unpack(entry.environ)) for entry in request.ranks)
    return next((unfit for unfit in verdicts if unfit is not None), None)


def _requests(channel: "Channel[ForgePlan | Fork]") -> Iterator[Fork]:
    while True:
        try:
            for line in channel.receive():
                if isinstance(line, Fork):
                    yield line
        except EOFError:
            return


class _Born:
    """In a rank: what it is to be, and who has to leave before it belongs to the warden."""

    def __init__(self, entry: RankEntry, parent: int) -> None:
        self.entry = entry
        self.parent = parent


def _fork(request: Fork, channel: "Channel[ForgePlan | Fork]") -> _Born | None:
    """Fork the ranks by way of a process that leaves at once: the warden inherits them."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return None
    parent = os.getpid()
    pids: list[int] = []
    try:
        for entry in request.ranks:
            pid = os.fork()
            if pid == 0:
                return _Born(entry, parent)
            pids.append(pid)
    except OSError as error:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        channel.send(Unfit(reason=f"the node cannot fork: {error}"))
        os._exit(_FAILED)
    channel.send(Forked(pids=tuple(pids)))
    os._exit(0)


def _become(
    entry: RankEntry, plan: ForgePlan, environ: MutableMapping[str, str], imports: ImportWatch
) -> None:
    was, own = dict(environ), unpack(entry.environ)
    environ.clear()
    environ.update(own)
    for name, value in imports.changes(own).items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    try:
        process_setup.become_session(
            stdout=entry.stdout, stderr=entry.stderr, cwd=plan.cwd, held=HELD
        )
    except OSError as error:
        process_setup.refuse(f"the rank cannot start: {error}")
    process_setup.python_signals()
    _draw_new_seeds(imports)
    _begin_anew()
    process_title.show(plan.command, sys.executable)
    restore_threads(was, environ)


def _draw_new_seeds(imports: ImportWatch) -> None:
    """Fresh processes draw different numbers; forked ones would all draw the forge's."""
    random.seed()
    for generator in imports.generators:
        generator.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # CUDA's starts from a constant in every process


def _begin_anew() -> None:
    """What modules of Python's own have noted of the process, as if it had begun now."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # noqa: SLF001
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        is_float = isinstance(logging._startTime, float)  # noqa: SLF001  since 3.13 in ns
        now = time.time() if is_float else time.time_ns()  # noqa: TID251 - of log lines
        logging._startTime = now  # noqa: SLF001
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
