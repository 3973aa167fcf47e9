"""The writer process of a rank: started when needed, and its death is noticed at once."""

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
from trainer_sdk.wire import Channel

_LOOK_EVERY_S = 1.0
_GONE_WITHIN_S = 5.0
_MODULE = "trainer_sdk.checkpoint.writer"
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *3 * [os.pardir]))


class WriterGoneError(Exception):
    """There is no writer, or it has died; the text says how."""


class WriterProcess:
    """The writer process, and the thread that hears it.

    The process dies with that thread, which lives as long as the rank or the process does.
    """

    def __init__(
        self,
        hear: Callable[[FromWriter], None],
        lost: Callable[[WriterGoneError], None],
        look: Callable[[float], None],
    ) -> None:
        self._hear = hear
        self._lost = lost
        self._look = look
        self._begun: queue.SimpleQueue[Channel[FromWriter] | Exception] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._is_wanted = True
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="everstep-writer", daemon=True)
        begun: Channel[FromWriter] | Exception
        try:
            self._thread.start()
            begun = self._begun.get()
        except RuntimeError as error:  # no thread is to be had, as at the end of the interpreter
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
        """Whether it takes orders."""
        return self._thread.is_alive() and self._is_wanted

    def send(self, order: ToWriter) -> None:
        """Send it an order. If it has died, `lost` is called."""
        with self._sending, suppress(OSError):
            self._channel.send(order)

    def kill(self) -> None:
        """Kill it; `lost` is not called."""
        self._is_wanted = False
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill it, and wait a few seconds until it has exited: it may hang in the kernel."""
        self.kill()
        self._thread.join(_GONE_WITHIN_S)

    def _run(self) -> None:
        # This thread's alone: the writer has them blocked from its birth until it ignores them.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        try:
            ours, self._process = _started()
        except OSError as error:
            self._begun.put(error)
            return
        channel: Channel[FromWriter] = Channel(ours, FromWriter)
        self._begun.put(channel)
        with ours, suppress(EOFError):
            while True:
                if select.select([ours], [], [], _LOOK_EVERY_S)[0]:
                    for line in channel.receive():
                        self._hear(line)
                self._look(time.monotonic())
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
    environ = dict(os.environ)  # noqa: TID251 - the writer has that of its rank
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", _MODULE, str(descriptor), str(os.getpid())],
        env=environ,
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
    hint = "; signal 9 without a reason is often the kernel, out of memory" if code == -9 else ""
    return WriterGoneError(f"the writer (process {process.pid}) died by {how}{hint}")
