"""The thread that watches one iteration of a wrapped function, and the link to the monitor."""

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from trainer_sdk.nvrx.inprocess import monitor_process
from trainer_sdk.nvrx.inprocess.absence import DONE, place_of
from trainer_sdk.nvrx.inprocess.interruption import Interruptible, Progress
from trainer_sdk.nvrx.inprocess.iteration_store import IterationStore
from trainer_sdk.rank_session import session
from trainer_sdk.sdk_log import warn, warn_once

if TYPE_CHECKING:
    from trainer_sdk.nvrx.inprocess.state import State
    from trainer_sdk.nvrx.inprocess.wrapper import CallWrapper, Wrapper

_LONGEST_POLL_S = 0.1
_POLL_S_A_RANK = 2e-5
_END_WITHIN_S = 5.0
_BACKLOG = 4096
_CONNECT_WITHIN_S = 10.0


class IterationWatch:
    """Ends the function when any rank has interrupted the iteration, or when it stands still."""

    def __init__(
        self,
        call: "CallWrapper",
        shared: IterationStore,
        interruptible: Interruptible,
        progress: Progress,
        monitor: "MonitorLink",
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat = beat
        self._beats_at = 0.0
        self._wrapper = call.wrapper
        self._frozen = call.state.freeze()
        self._shared = shared
        self._interruptible = interruptible
        self._progress = progress
        self._monitor = monitor
        self._ended = threading.Event()
        self._has_aborted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-restart", daemon=True)

    def __enter__(self) -> "IterationWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(self._wrapper.barrier_timeout.total_seconds())

    def await_abort(self) -> None:
        """Wait until the process groups are aborted, which other ranks may wait for."""
        self._has_aborted.wait(self._wrapper.hard_timeout.total_seconds())

    def _run(self) -> None:
        poll_s = min(
            self._wrapper.monitor_thread_interval.total_seconds(),
            max(_LONGEST_POLL_S, self._shared.world_size * _POLL_S_A_RANK),
        )
        try:
            while not self._ended.wait(poll_s):
                self._look()
                if self._shared.is_interrupted() and not self._shared.is_full(DONE):
                    self._interrupt()
                    return
        except Exception as error:  # noqa: BLE001 - without a store this rank cannot restart
            warn(f"the store of the in-process restarts cannot be reached: {error}")
            self._monitor.stop_watching()
        finally:
            self._has_aborted.set()

    def _look(self) -> None:
        """Report progress to the monitor, and interrupt the iteration past the soft limit."""
        if (now := monotonic()) >= self._beats_at:
            self._beats_at = now + self._wrapper.barrier_timeout.total_seconds() / 4
            self._beat()
        idle_s = self._progress.look()
        self._monitor.send(f"alive {idle_s:.3f}")
        rank = self._frozen.rank
        if idle_s > self._wrapper.soft_timeout.total_seconds() and rank is not None:
            warn_once(f"rank {rank} has made no progress for {idle_s:.0f} s: all ranks restart")
            self._shared.interrupt(rank, "SOFT_TIMEOUT")

    def _interrupt(self) -> None:
        self._ended.wait(0)
        threading.Event().wait(self._wrapper.last_call_wait.total_seconds())
        with self._interruptible.atomic_lock:
            try:
                if self._wrapper.abort is not None:
                    self._wrapper.abort(self._frozen)
            except Exception as error:  # noqa: BLE001 - the function must end all the same
                warn(f"abort failed: {type(error).__name__}: {error}", self._frozen.rank)
            self._has_aborted.set()
            self._interruptible.interrupt()


class Presence:
    """A connection to the monitor of the first rank, which both the rank and its monitor hold.

    The kernel closes it when both are gone: then that monitor speaks for the rank.
    """

    def __init__(self, host: str, shared: IterationStore, *, is_first: bool) -> None:
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        try:
            if is_first:
                both = socket.has_dualstack_ipv6()
                family = socket.AF_INET6 if both else socket.AF_INET
                self._listener = socket.create_server(
                    ("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both
                )
            port = str(self._listener.getsockname()[1]) if self._listener is not None else ""
        except OSError as error:
            warn_once(f"a rank that is gone with its monitor will not be noticed: {error}")
            port = ""
        if is_first:
            shared.put("presence", port)
            return
        (port,) = shared.take(["presence"])
        if port:
            self._connect(host, int(port))

    def _connect(self, host: str, port: int) -> None:
        try:
            self._connection = socket.create_connection((host, port), _CONNECT_WITHIN_S)
        except OSError as error:
            text = f"if this rank is gone with its monitor, nobody will notice: {host}:{port}"
            warn_once(f"{text}: {error}")
        else:
            _connections.add(self._connection)

    @property
    def descriptors(self) -> "dict[str, int]":
        """What the monitor process inherits: -1 for what there is not."""
        held = {"listener": self._listener, "presence": self._connection}
        return {name: -1 if it is None else it.fileno() for name, it in held.items()}

    def inherited(self) -> None:
        """The monitor process has what it needs."""
        if self._listener is not None:
            self._listener.close()

    def send(self, line: str) -> None:
        """Send a line, as far as anybody reads."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.sendall(f"{line}\n".encode())

    def close(self) -> None:
        """Say goodbye: this rank ends by itself."""
        self.send("bye")
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_inherited() -> None:
    """A worker of the rank, which may outlive it, must not hold its connection."""
    for connection in _connections:
        connection.close()


os.register_at_fork(after_in_child=_close_inherited)


class MonitorLink:
    """The monitor process of this rank, and the lines that it reads."""

    def __init__(
        self, wrapper: "Wrapper", state: "State", store: Any, shared: IterationStore | None = None
    ) -> None:
        rank = state.initial_rank or 0
        link = session()._link  # noqa: SLF001 - the same package
        hard_s = wrapper.hard_timeout.total_seconds()
        # An agent that starts all ranks again replaces a lost process, too.
        place = None if link.starts_ranks else place_of(store)
        self._initial = rank
        self._presence: Presence | None = None
        if place is not None and shared is not None:
            host = place.get("host") or socket.gethostname()
            self._presence = Presence(host, shared, is_first=rank == 0)
        held = {"listener": -1, "presence": -1}
        if self._presence is not None:
            held = self._presence.descriptors
        settings = {
            "pid": os.getpid(),
            "rank": rank,
            "hard_s": hard_s,
            "grace_s": wrapper.termination_grace_time.total_seconds(),
            "interval_s": wrapper.monitor_process_interval.total_seconds(),
            "logfile": _filled(wrapper.monitor_process_logfile, rank),
            "store": place,
            **held,
            "beat_s": wrapper.heartbeat_interval.total_seconds(),
            "unheard_s": wrapper.heartbeat_timeout.total_seconds(),
            "path": sys.path,
            "agent": link.fileno(),
            "hung": link.line("hung", f'"limit_s":{hard_s!r}'),
            "restarts": link.line("hung", f'"limit_s":{hard_s!r},"is_over":true'),
        }
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(  # noqa: S603 - ours
            [sys.executable, "-P", "-S", monitor_process.__file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number for number in (link.fileno(), *held.values()) if number >= 0],
            start_new_session=True,  # signals of the terminal are for the rank
        )
        if self._presence is not None:
            self._presence.inherited()
        pidfile = _filled(wrapper.monitor_process_pidfile, rank)
        if pidfile:
            Path(pidfile).write_text(f"{self._process.pid}\n", encoding="utf-8")

    def begin(self, shared: IterationStore, prefix: str, rank: int) -> None:
        """Report the iteration for which the monitor speaks if the rank is gone."""
        line = f"iteration {prefix} {rank} {shared.world_size} {self._initial}"
        self.send(line)
        if self._presence is not None:
            self._presence.send(line)

    def send(self, line: str) -> None:
        """Send a line; without a monitor there is no hard limit, and a warning reports it."""
        with self._lock:
            process = self._process
            if process is None or process.stdin is None:
                return
            try:
                process.stdin.write(f"{line}\n".encode())
                process.stdin.flush()
            except OSError as error:
                self._process = None
                warn_once(f"the monitor process is gone: the hard limit does not hold ({error})")

    def stop_watching(self) -> None:
        """Have the monitor end, and leave the rank alone."""
        self.send("bye")

    def close(self) -> None:
        """End the monitor process."""
        process = self._process
        if self._presence is not None:
            self._presence.close()
        self.send("bye")
        if process is not None and process.stdin is not None:
            self._process = None
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _filled(path: str | None, rank: int) -> str | None:
    return None if path is None else path.replace("{rank}", str(rank))
