"""The forge: a process that has imported torch, and forks ranks from it.

A rank that is forked here differs from one that was started afresh, in ways that we know of:

- `PYTHONHASHSEED` unset: fresh processes have a seed each, those forked share the forge's.
- `/proc/PID/environ` shows the forge's environment; the rank itself has its own, in Python and C.
- `sys.flags`, `sys.orig_argv` and what modules read from the environment when they were imported
  are the forge's. Variables that Python or the loader read at their start (`PYTHON…`, `LD_…`)
  therefore have to be the same: the warden starts ranks cold if they are not.
- Files that an import has opened stay open, shared with the other ranks of the round.
"""

import gc
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator, MutableMapping

from trainer_sdk.bootstrap import entering, title
from trainer_sdk.bootstrap.preload import preload, why_unsafe
from trainer_sdk.bootstrap.threads import restore_threads
from trainer_sdk.wire import (
    Channel,
    Command,
    ForgePlan,
    ForgeUp,
    Fork,
    Forked,
    RankEntry,
    ToForge,
    Unfit,
    unpack,
)

_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FAILED = 1


def main(descriptor: int, environ: MutableMapping[str, str]) -> Command | None:
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
    # forked gets what was sent to it as soon as it is ready.
    signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)
    entering.die_with(plan.warden, born_of=plan.warden)
    os.chdir(plan.cwd)
    done = preload(plan)
    gc.collect()
    gc.freeze()  # so that no collection in a rank writes to the pages that all share
    if done.unfit is not None:
        channel.send(done.unfit)
        return None
    took_s = time.monotonic() - began
    channel.send(ForgeUp(took_s=took_s, preloaded=tuple(done.names), failed=tuple(done.failed)))
    entry = _serve(channel, plan)
    if entry is None:
        return None
    _become(entry, plan, environ)
    return plan.command


def _serve(channel: "Channel[ForgePlan | Fork]", plan: ForgePlan) -> RankEntry | None:
    for request in _requests(channel):
        reason = why_unsafe()
        if reason:
            channel.send(Unfit(reason=reason))
            continue
        born = _fork(request, channel)
        if born is not None:
            channel.close()
            entering.die_with(plan.warden, born_of=born.parent)
            return born.entry
    return None


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


def _become(entry: RankEntry, plan: ForgePlan, environ: MutableMapping[str, str]) -> None:
    was = dict(environ)
    environ.clear()
    environ.update(unpack(entry.environ))
    try:
        entering.become_session(stdout=entry.stdout, stderr=entry.stderr, cwd=plan.cwd)
    except OSError as error:
        entering.refuse(f"the rank cannot start: {error}")
    entering.python_signals()
    _draw_new_seeds()
    title.show(plan.command, sys.executable)
    restore_threads(was, environ)


def _draw_new_seeds() -> None:
    """Fresh processes draw different numbers; forked ones would all draw the forge's."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # CUDA's starts from a constant in every process
