"""The connections of a server: how many there may be, and how long each may be silent.

    accepted ─▶ headers ─▶ body ─▶ answered ─▶ headers …
                   │         │         └ the application's own limits
                   └─────────┴─▶ cut: too late, or the longest silent when there are too many

Clients without a token get no further than this. A process keeps file descriptors for its own
connections, from any client.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

_AT_ONCE = 64
_PAUSE_S = 0.2
_SAY_EVERY_S = 60.0
_OUT_OF_THEM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_MOST_DESCRIPTORS = 1 << 20


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of a server for its clients, before they have sent a token."""

    most: int = 200
    """Open connections. One more cuts the one that has been silent longest."""
    headers_within_s: float = 15.0
    body_within_s: float = 20.0
    answer_taken_within_s: float = 30.0
    """How long a client may leave an answer in our buffers."""

    def fitting(self) -> int:
        """How many connections there may be, with half of the descriptors left to the process."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(self.most, soft // 2))


def raise_descriptor_limit() -> None:
    """Allow this process as many open files as its hard limit says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the kernel allows less than it said
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Open(Protocol):
    """A connection, as the limits see it."""

    @property
    def is_idle(self) -> bool:
        """Whether no request on it is being answered."""

    def cut(self) -> None:
        """Close it at once."""


class Connections:
    """The connections of one server: first those without a request, the longest silent first."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.most = limits.fitting()
        self._new: dict[_Open, None] = {}
        self._answered: dict[_Open, None] = {}
        self._cut = 0
        self._said_at: float | None = None

    def admit(self, connection: _Open) -> bool:
        """Whether it may stay; if there are too many, the oldest without a request is closed."""
        if len(self._new) + len(self._answered) >= self.most and not self.cut_oldest():
            self.note_cut("all connections are being answered")
            return False
        self._new[connection] = None
        return True

    def answered(self, connection: _Open) -> None:
        """Its request was answered."""
        self.forget(connection)
        self._answered[connection] = None

    def forget(self, connection: _Open) -> None:
        """It was closed."""
        self._new.pop(connection, None)
        self._answered.pop(connection, None)

    def cut_oldest(self) -> bool:
        """Close the connection that has been without a request longest; False if there is none."""
        idle = next((item for item in chain(self._new, self._answered) if item.is_idle), None)
        if idle is None:
            return False
        self.forget(idle)
        idle.cut()
        self.note_cut(f"{self.most} connections are the most")
        return True

    def note_cut(self, reason: str) -> None:
        """Count a connection that was closed; one line a minute at most."""
        self._cut += 1
        now = asyncio.get_running_loop().time()
        if self._said_at is None or now - self._said_at >= _SAY_EVERY_S:
            self._said_at = now
            count, self._cut = self._cut, 0
            left = len(self._new) + len(self._answered)
            log.warning("connections_cut count=%d open=%d reason=%s", count, left, reason)


class BoundedConnection(H11Protocol):
    """uvicorn's protocol, with a limit for each thing that a client can be slow at."""

    def __init__(self, *args: Any, among: Connections, **named: Any) -> None:
        super().__init__(*args, **named)
        self._among = among
        self._phase: tuple[str, object] = ("", None)
        self._late: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request on it is being answered."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or bool(cycle.response_complete)

    def cut(self) -> None:
        """Close it at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._among.admit(self):
            self._watch()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._among.forget(self)
        for timer in (self._late, self._untaken):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_taking()
        if not self.transport.is_closing():
            self._among.answered(self)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await_taking()

    def _await_taking(self) -> None:
        """Give the client time for what is in our buffers; a closed connection waits for it, too.

        asyncio pauses no answer that fits into its buffer, and closes none that is left there.
        """
        if self._untaken is not None:
            self._untaken.cancel()
        within_s = self._among.limits.answer_taken_within_s
        self._untaken = self.loop.call_later(within_s, self._cut_untaken)

    def _cut_untaken(self) -> None:
        if self.transport.get_write_buffer_size():
            self.cut()
            self._among.note_cut("an answer was not taken")

    def _watch(self) -> None:
        """Start a timer for the part that is due; single bytes do not extend it."""
        state, limits = self.conn.their_state, self._among.limits
        name = {h11.IDLE: "headers", h11.SEND_BODY: "body"}.get(state, "")
        if (name, self.cycle) == self._phase:
            return
        self._phase = (name, self.cycle)
        if self._late is not None:
            self._late.cancel()
        within_s = {"headers": limits.headers_within_s, "body": limits.body_within_s}.get(name)
        if within_s is not None:
            self._late = self.loop.call_later(within_s, self._cut_late, f"{name} came too slowly")

    def _cut_late(self, reason: str) -> None:
        if not self.transport.is_closing():
            self.cut()
            self._among.note_cut(reason)


class Acceptor:
    """Accepts connections from a listening socket, and does not spin when it cannot."""

    def __init__(
        self, listener: socket.socket, among: Connections, adopt: Callable[[socket.socket], object]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._among = among
        self._adopt = adopt
        self._again: asyncio.TimerHandle | None = None
        self._is_open = True
        self._listen()

    def close(self) -> None:
        """Stop accepting, before the socket is closed."""
        self._is_open = False
        if self._again is not None:
            self._again.cancel()
        with contextlib.suppress(ValueError):  # it is closed already
            self._loop.remove_reader(self._listener)

    def _listen(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connected, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_THEM:
                    raise
                self._pause(error)
                return
            connected.setblocking(False)  # noqa: FBT003  the library's signature
            self._adopt(connected)

    def _pause(self, error: OSError) -> None:
        """Without descriptors the socket stays readable: look again later, with some freed."""
        for _ in range(_AT_ONCE):
            if not self._among.cut_oldest():
                break
        self._among.note_cut(f"no connection can be taken: {error.strerror}")
        self._loop.remove_reader(self._listener)
        self._again = self._loop.call_later(_PAUSE_S, self._listen)
