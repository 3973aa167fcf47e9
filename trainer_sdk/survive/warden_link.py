"""The connection to the warden, which ends a round, and begins the next in the same process."""

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from trainer_sdk.bootstrap.agent_link import ShortPath
from trainer_sdk.wire import Channel, GoOn, Park, Parked, SaveTogether, Survives, ToSurvivor

_AGAIN_S = 0.2
_PATIENCE = 1.5
"""In steps: a rank in the next step waits in vain for ranks that have left after this one."""


class WardenGoneError(RuntimeError):
    """The warden is gone, or does not want this process in the next round."""


class WardenLink:
    """A thread reads the orders of the warden. OSError if the warden does not listen."""

    def __init__(self, path: str, park_within_s: float, abort: Callable[[], None]) -> None:
        self.step_s: Callable[[], float] = lambda: 0.0
        """How long a step takes; where nothing has failed, a rank may finish its own first."""
        self._longest_wait_s = park_within_s / 2
        self.ends_soon = False
        """Whether the present round ends with this step."""
        wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            with ShortPath(path) as short:
                wire.connect(short)
            self._channel: Channel[ToSurvivor] = Channel(wire, ToSurvivor)
            self._channel.send(Survives(park_within_s=park_within_s))
        except OSError:
            wire.close()
            raise
        self._wire = wire
        self._abort = abort
        self._has_left = threading.Event()
        self._aborting = threading.Lock()
        self._news = threading.Condition()
        self.is_over = False
        """Whether the present round has ended."""
        self._is_gone = False
        self._orders: queue.SimpleQueue[GoOn | SaveTogether | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name="everstep-survive", daemon=True)
        self._thread.start()
        _open.append(self)

    def await_park(self, within_s: float) -> bool:
        """Wait until the warden ends the round; False if it does not in time."""
        with self._news:
            self._news.wait_for(lambda: self.is_over or self._is_gone, within_s)
            return self.is_over

    def leave(self) -> None:
        """Note that the training has left its function: groups are not aborted any more."""
        self._has_left.set()
        with self._aborting:
            return

    def park(self, step: int | None, *, is_torn: bool) -> None:
        """Report that this process is ready for the next round."""
        try:
            self._channel.send(Parked(step=step, is_torn=is_torn))
        except OSError as error:
            raise WardenGoneError(f"the round has ended, and the warden is gone: {error}") from None

    def next_order(self) -> GoOn | SaveTogether:
        """Wait for the order that begins the next round, or one to save before it."""
        order = self._orders.get()
        if order is None:
            raise WardenGoneError("the round has ended, and this process is not in the next")
        return order

    def close(self) -> None:
        """Take part in no other round."""
        if self in _open:
            _open.remove(self)
        with suppress(OSError):  # the warden is gone
            self._wire.shutdown(socket.SHUT_RDWR)
        self._has_left.set()
        self._thread.join()
        self._wire.close()

    def forget(self) -> None:
        """Close the descriptor in a process that the rank has forked."""
        os.close(self._wire.detach())

    def _listen(self) -> None:
        # The handlers of signals run in the main thread, which may wait for one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while True:
                for line in self._channel.receive():
                    self._hear(line)
        except (EOFError, OSError, msgspec.MsgspecError):
            with self._news:
                self._is_gone = True
                self._news.notify_all()
            self._orders.put(None)

    def _hear(self, line: ToSurvivor) -> None:
        if isinstance(line, GoOn | SaveTogether):
            self._has_left.clear()
            self.is_over = self.ends_soon = False
            self._orders.put(line)
            return
        assert isinstance(line, Park)
        if line.is_planned:
            self.ends_soon = True
            self._has_left.wait(min(_PATIENCE * self.step_s(), self._longest_wait_s))
        with self._news:
            self.is_over = True
            self._news.notify_all()
        while not self._has_left.is_set():
            with self._aborting:
                if not self._has_left.is_set():
                    self._abort()
            self._has_left.wait(_AGAIN_S)


_open: list[WardenLink] = []


def _forget_all() -> None:
    for link in _open:
        link.forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
