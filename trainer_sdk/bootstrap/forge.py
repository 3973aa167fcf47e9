"""The forge: a process that has imported torch, and forks ranks from it.

A forked rank differs from a freshly started process in these known ways:

- Without `PYTHONHASHSEED`, fresh processes have a hash seed each; forked ranks share the forge's.
- `/proc/PID/environ` shows the forge's environment; the rank has its own, in Python and in C.
- `sys.flags` are the forge's. So variables that Python or the loader read at their start
  (`PYTHON…`, `LD_…`) must be the same; if they differ, the warden starts the ranks cold. A module
  that reads values of a single rank at its import is left to the ranks: see `import_watch`.
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

from trainer_sdk.bootstrap import process_setup
from trainer_sdk.bootstrap.deferred_signals import HELD
from trainer_sdk.bootstrap.import_watch import ImportWatch
from trainer_sdk.bootstrap.preload import NVML_CHECK, preload, why_unsafe
from trainer_sdk.bootstrap.process_setup import restore_threads
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

_BLOCKED = (*HELD, signal.SIGQUIT)
_FAILED = 1


def main(descriptor: int, environ: MutableMapping[str, str]) -> RankCommand | None:
    """Serve as a forge until the warden is gone.

    Returns None in the forge itself, and the command to run in each forked rank. So a rank's
    script runs near the bottom of the stack, with no frame of the forge below it.
    """
    wire = socket.socket(fileno=descriptor)
    channel: Channel[ForgePlan | Fork] = Channel(wire, ToForge)
    began = time.monotonic()
    plan = channel.receive_first()
    assert isinstance(plan, ForgePlan), "the warden's first line"
    # A signal to a whole job is meant for its ranks. The forge blocks it and does not ignore it: a
    # rank that was just forked gets a pending signal once its bootstrap unblocks it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    process_setup.die_with(plan.warden, born_of=plan.warden)
    os.chdir(plan.cwd)
    environ.setdefault(NVML_CHECK, "1")
    imports = ImportWatch(plan.own, environ)
    done = preload(plan, imports)
    gc.collect()
    gc.freeze()  # so that no collection in a rank writes to the shared memory pages
    if done.unfit is not None:
        channel.send(done.unfit)
        return None
    took_s = time.monotonic() - began
    channel.send(ForgeUp(took_s=took_s, preloaded=tuple(done.names), failed=tuple(done.failed)))
    entry = _serve(channel, plan, imports)
    if entry is None:
        return None
    _become_rank(entry, plan, environ, imports)
    for warned in done.warned:
        warnings._showwarnmsg(warned)  # type: ignore[attr-defined]  # noqa: SLF001
    return plan.command


def _serve(
    channel: "Channel[ForgePlan | Fork]", plan: ForgePlan, imports: ImportWatch
) -> RankEntry | None:
    for request in _requests(channel):
        unfit = _why_unfit(request, imports)
        if unfit is not None:
            channel.send(unfit)
            continue
        born = _fork(request, channel)
        if born is not None:
            channel.close()
            process_setup.die_with(plan.warden, born_of=born.parent)
            return born.entry
    return None


def _why_unfit(request: Fork, imports: ImportWatch) -> Unfit | None:
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


class _ForkedRank:
    """In a forked rank: its entry, and the parent that must exit before the warden adopts it."""

    def __init__(self, entry: RankEntry, parent: int) -> None:
        self.entry = entry
        self.parent = parent


def _fork(request: Fork, channel: "Channel[ForgePlan | Fork]") -> _ForkedRank | None:
    """Fork the ranks through a process that exits at once, so that the warden adopts them."""
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
                return _ForkedRank(entry, parent)
            pids.append(pid)
    except OSError as error:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        channel.send(Unfit(reason=f"the node cannot fork: {error}"))
        os._exit(_FAILED)
    channel.send(Forked(pids=tuple(pids)))
    os._exit(0)


def _become_rank(
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
    _reset_modules()
    process_setup.show_title(plan.command, sys.executable)
    restore_threads(was, environ)


def _draw_new_seeds(imports: ImportWatch) -> None:
    """Seed all generators anew: otherwise all forked ranks would draw the same numbers."""
    random.seed()
    for generator in imports.generators:
        generator.seed()
    numbers = sys.modules.get("numpy.random")  # if it is not loaded yet, it seeds itself
    if numbers is not None:
        numbers.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # CUDA's generator starts from a constant in every process


def _reset_modules() -> None:
    """Reset what modules of the standard library keep of the process: id, start time, secret."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # noqa: SLF001
    logging: Any = sys.modules.get("logging")
    if logging is not None:
        is_float = isinstance(logging._startTime, float)  # noqa: SLF001  since 3.13 in ns
        now = time.time() if is_float else time.time_ns()  # noqa: TID251 - of log lines
        logging._startTime = now  # noqa: SLF001
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
