"""The writer process of a rank: it starts when needed, and its death is detected at once."""

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from trainer_sdk.bootstrap.deferred_signals import HELD
from trainer_sdk.checkpoint.writer.protocol import FromWriter, ToWriter
from trainer_sdk.environment import environ
from trainer_sdk.wire import Channel

_LOOK_EVERY_S = 1.0
_GONE_WITHIN_S = 5.0
_MODULE = "trainer_sdk.checkpoint.writer"
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *3 * [os.pardir]))


class WriterGoneError(Exception):
    """The writer could not start, or has died; the text has the cause."""


class WriterProcess:
    """The writer process, and the thread that reads its messages.

    The process dies with that thread, which lives until the rank or the writer ends.
    """

    def __init__(
        self,
        receive: Callable[[FromWriter], None],
        lost: Callable[[WriterGoneError], None],
        check: Callable[[float], None],
    ) -> None:
        self._receive = receive
        self._lost = lost
        self._check = check
        self._begun: queue.SimpleQueue[Channel[FromWriter] | Exception] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._is_wanted = True
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="everstep-writer", daemon=True)
        begun: Channel[FromWriter] | Exception
        try:
            self._thread.start()
            begun = self._begun.get()
        except RuntimeError as error:  # no thread can start at the end of the interpreter
            begun = error
        if isinstance(begun, Exception):
            raise WriterGoneError(f"the writer cannot be started: {begun}") from begun
        self._channel = begun

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it accepts orders."""
        return self._thread.is_alive() and self._is_wanted

    def send(self, order: ToWriter) -> None:
        """Send an order. If the writer has died, its thread calls `lost`."""
        with self._sending, suppress(OSError):
            self._channel.send(order)

    def kill(self) -> None:
        """Kill it; `lost` is not called."""
        self._is_wanted = False
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill it, and wait at most a few seconds for its exit: it may hang in the kernel."""
        self.kill()
        self._thread.join(_GONE_WITHIN_S)

    def _run(self) -> None:
        # Only in this thread: the writer inherits the mask, until it ignores the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        try:
            ours, self._process = _started()
        except OSError as error:
            self._begun.put(error)
            return
        channel: Channel[FromWriter] = Channel(ours, FromWriter)
        self._begun.put(channel)
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(ours, select.POLLIN)
        with ours, suppress(EOFError):
            while True:
                if poll.poll(_LOOK_EVERY_S * 1000):
                    for line in channel.receive():
                        self._receive(line)
                self._check(time.monotonic())
        gone = _how(self._process)
        was_wanted, self._is_wanted = self._is_wanted, False
        if was_wanted:
            self._lost(gone)


def _started() -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return ours, _spawn(theirs.fileno())
        except OSError:
            ours.close()
            raise


def _spawn(descriptor: int) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(filter(None, [_ROOT, environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(  # noqa: S603 - a module of ours
        [sys.executable, "-P", "-m", _MODULE, str(descriptor), str(os.getpid())],
        env={**environ, "PYTHONPATH": path},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _how(process: "subprocess.Popen[bytes]") -> WriterGoneError:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
    if process.returncode is None:
        process.kill()
        process.wait()
    code = process.returncode
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    hint = "; signal 9 often means that the kernel was out of memory" if code == -9 else ""
    return WriterGoneError(f"the writer (process {process.pid}) died by {how}{hint}")
