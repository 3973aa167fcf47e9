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
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import MutableMapping
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
    FromForge,
    RankCommand,
    RankEntry,
    ToForge,
    Unfit,
    unpack,
)

_BLOCKED = (*HELD, signal.SIGQUIT)
_FAILED = 1
_SPARE_FOR_S = 1.0
"""How long a rank that was forked ahead, and is not needed, waits with its end: an exit takes as
much of a processor as a start, and the ranks of the round begin at this moment."""
_NICENESS = 19
_AHEAD_AFTER_S = 0.4
"""Ranks for the next round are forked when those of this one have had time to start."""


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
    crew = _Crew(channel)
    while True:
        lines: list[ForgePlan | Fork | None]
        try:
            lines = [*_hear(channel, _AHEAD_AFTER_S if crew.is_due else None)]
        except EOFError:
            return None
        for line in lines or [None]:
            born = crew.fork(line, imports) if isinstance(line, Fork) else crew.fork_ahead()
            if born is not None:
                process_setup.die_with(plan.warden, born_of=born.parent)
                return born.entry


def _hear(channel: "Channel[ForgePlan | Fork]", within_s: float | None) -> "list[ForgePlan | Fork]":
    """The warden's next lines; none if none comes in time."""
    while channel.early or select.select([channel], [], [], within_s)[0]:
        if lines := channel.receive():
            return lines
    return []


def _why_unfit(request: Fork, imports: ImportWatch) -> Unfit | None:
    if reason := why_unsafe():
        return Unfit(reason=reason)
    verdicts = (imports.why_unfit(unpack(entry.environ)) for entry in request.ranks)
    return next((unfit for unfit in verdicts if unfit is not None), None)


class _ForkedRank:
    """In a forked rank: its entry, and the parent that must exit before the warden adopts it."""

    def __init__(self, entry: RankEntry, parent: int) -> None:
        self.entry = entry
        self.parent = parent


class _Crew:
    """The ranks of the next round. Its methods return an entry in forked ranks only."""

    def __init__(self, channel: "Channel[ForgePlan | Fork]") -> None:
        self._channel = channel
        self._holder: _Holder | None = None
        self._wanted = 0

    @property
    def is_due(self) -> bool:
        """Whether ranks should be forked ahead, once those of this round have started."""
        return self._wanted > 0 and self._holder is None

    def fork_ahead(self) -> _ForkedRank | None:
        """Fork as many as in the last round."""
        try:
            made = _hold(self._wanted, self._channel)
        except OSError:  # each round forks its own
            self._wanted = 0
            return None
        if isinstance(made, _ForkedRank):
            return made
        self._holder = made
        return None

    def fork(self, request: Fork, imports: ImportWatch) -> _ForkedRank | None:
        """Have the ranks of a round start, and tell the warden."""
        unfit = _why_unfit(request, imports)
        if unfit is not None:
            self._channel.send(unfit)
            return None
        holder, self._holder = self._holder, None
        if holder is None or not holder.is_there():
            made = _hold(0, self._channel)
            if isinstance(made, _ForkedRank):
                return made
            holder = made
        self._channel.send(holder.give(request))
        self._wanted = len(request.ranks)
        return None


class _Holder:
    """A process that forks ranks, and exits at once when they go to work: the warden adopts them.

    It may fork them ahead of their round. It forks again in place of those that have ended.
    """

    def __init__(self, pid: int, wire: socket.socket) -> None:
        self._pid = pid
        self._channel: Channel[Forked | Unfit] = Channel(wire, FromForge)

    def is_there(self) -> bool:
        """Whether it has not been killed."""
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
            self._channel.close()
        return bool(self._pid)

    def give(self, request: Fork) -> Forked | Unfit:
        """Have these ranks go to work."""
        try:
            self._channel.send(request)
            return self._channel.receive_first()
        except (EOFError, OSError):
            return Unfit(reason="the process that forks ranks was killed")
        finally:
            self._channel.close()
            os.waitpid(self._pid, 0)


def _hold(ahead: int, channel: "Channel[ForgePlan | Fork]") -> _Holder | _ForkedRank:
    """Fork a holder, and in it this many ranks. A forked rank returns when it has its entry."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return _Holder(pid, ours)
    ours.close()
    channel.close()  # else the warden would not see the end of the forge
    parent = os.getpid()
    return _ForkedRank(_held(ahead, Channel(theirs, ToForge)), parent)


def _held(ahead: int, wire: "Channel[Fork]") -> RankEntry:
    """Serve as the holder; returns in forked ranks only."""
    waiting: list[tuple[int, Channel[Fork]]] = []
    for _ in range(ahead):
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:  # it will be tried again when they are needed
            break
        if pid == 0:
            ours.close()
            _close(wire, waiting)
            return _await(Channel(theirs, ToForge)).ranks[0]
        theirs.close()
        waiting.append((pid, Channel(ours, ToForge)))
    return _put_to_work(_await(wire), waiting, wire)


def _put_to_work(
    request: Fork, waiting: "list[tuple[int, Channel[Fork]]]", wire: "Channel[Fork]"
) -> RankEntry:
    pids: list[int] = []
    try:
        for entry in request.ranks:
            pid = _wake(waiting, Fork(round=request.round, ranks=(entry,))) or os.fork()
            if pid == 0:
                _close(wire, waiting)
                return entry
            pids.append(pid)
    except OSError as error:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wire.send(Unfit(reason=f"the node cannot fork: {error}"))
        os._exit(_FAILED)
    wire.send(Forked(pids=tuple(pids)))
    while _wake(waiting, Fork(round=request.round, ranks=())):
        continue
    os._exit(0)


def _close(wire: "Channel[Fork]", waiting: "list[tuple[int, Channel[Fork]]]") -> None:
    """In a rank: drop the ends that only its holder may keep."""
    wire.close()
    for _, channel in waiting:
        channel.close()


def _await(channel: "Channel[Fork]") -> Fork:
    """Wait for the request; exit if there is none for this process."""
    try:
        request = channel.receive_first()
    except EOFError:
        os._exit(0)
    if not request.ranks:
        os.nice(_NICENESS)
        time.sleep(_SPARE_FOR_S)
        os._exit(0)
    for number in _BLOCKED:  # drops what was sent to it while it was nobody's rank
        signal.signal(number, signal.SIG_IGN)
    return request


def _wake(waiting: "list[tuple[int, Channel[Fork]]]", request: Fork) -> int:
    """Give a waiting rank its entry; its process id, 0 if none is left."""
    while waiting:
        pid, channel = waiting.pop()
        try:
            channel.send(request)
        except OSError:  # it was killed
            continue
        finally:
            channel.close()
        return pid
    return 0


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
