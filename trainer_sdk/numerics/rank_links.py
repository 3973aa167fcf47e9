"""Connections from rank to rank, on which ranks agree.

A message of gloo's own wakes a thread at its end, is announced by another one, and makes objects at
both: that takes several times as much of the processor. gloo still serves where a rank cannot be
reached by such a connection.
"""

import fcntl
import hmac
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from threading import Condition, Thread
from time import monotonic

import msgspec

from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.environment import environ

_CONNECT_S = 5.0
_TOKEN_BYTES = 16
_SIOCGIFADDR = 0x8915
_OCTETS = [bytes([octet]) for octet in range(256)]
_TURN = struct.Struct("q")
_CALLED_WITHIN_S = 5.0
"""How long a call waits for the other ranks; a rank may hold the lock of its interpreter."""


class RankAddress(msgspec.Struct, frozen=True):
    """Where a rank listens, and what the ranks that connect must know; no port if it cannot."""

    host: str = ""
    port: int = 0
    token: str = ""


class ByteLink:
    """A connection to a rank ahead, and the one from a rank behind."""

    def __init__(
        self,
        ahead: socket.socket,
        behind: socket.socket,
        ranks: tuple[int, int],
        limit_s: float,
    ) -> None:
        self._ahead, self._behind = ahead, behind
        self._to, self._source = ranks
        self._limit_s = limit_s
        if ahead.family == socket.AF_INET:
            ahead.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ahead.settimeout(None)
        behind.settimeout(None)
        self._say, self._hear = ahead.send, behind.recv
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        behind.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)  # without a call of poll

    def passed_on(self, own: int) -> int:
        """Send this byte; return that of the rank behind."""
        try:
            self._say(_OCTETS[own])
            if octets := self._hear(1):
                return octets[0]
        except (BlockingIOError, BrokenPipeError) as error:
            raise self._named(error) from None
        raise _closed(self._source)

    def tell(self, turn: int) -> None:
        """Send a turn to the rank ahead."""
        try:
            self._ahead.sendall(_TURN.pack(turn))
        except BrokenPipeError as error:
            raise self._named(error) from None

    def heard(self) -> int:
        """Wait for the turn that the rank behind sends."""
        (turn,) = _TURN.unpack(self._received(_TURN.size))
        return int(turn)

    def fileno(self) -> int:
        """Where the rank behind is heard."""
        return self._behind.fileno()

    def check(self) -> None:
        """Raise an error if the rank behind has ended; something must have been heard."""
        self._received(1, socket.MSG_PEEK)

    def _received(self, count: int, flags: int = socket.MSG_WAITALL) -> bytes:
        try:
            octets = self._behind.recv(count, flags)
        except BlockingIOError as error:
            raise self._named(error) from None
        if len(octets) < count:
            raise _closed(self._source)
        return octets

    def _named(self, error: BlockingIOError | BrokenPipeError) -> OSError:
        """The same with the rank."""
        if isinstance(error, BrokenPipeError):
            return _closed(self._to)
        return TimeoutError(
            f"Timed out waiting {self._limit_s * 1000:.0f}ms for recv of the decision of "
            f"rank {self._source}"
        )

    def close(self) -> None:
        """Be gone for both ranks."""
        self._ahead.close()
        self._behind.close()

    __del__ = close


class RankAlarm:
    """Calls all ranks to decide in the same turn; while nobody calls, nothing is sent.

    A turn is what all ranks count alike. In each rank a thread waits for the others. A call wakes
    all threads, and they find the first turn that no rank has begun. A rank that begins a turn in
    the meantime waits until it knows whether that is the one.
    """

    def __init__(self, links: Sequence[ByteLink], limit_s: float) -> None:
        self.turn = 0
        """The turn that this rank has begun: set it before `is_called` is read."""
        self.is_called = False
        """Whether `is_due` must be asked."""
        self._links, self._limit_s = links, limit_s
        self._due: deque[int] = deque()
        self._is_agreeing = self._is_over = False
        self._error: OSError | None = None
        self._changed = Condition()
        self._bell, self._rung = socket.socketpair()
        Thread(target=self._listen, name="everstep-numerics", daemon=True).start()

    def is_due(self) -> bool:
        """Whether all ranks decide in this turn; it waits until that is clear."""
        with self._changed:
            if not self._changed.wait_for(self._is_settled, self._limit_s):
                raise TimeoutError("the ranks could not agree on the step in which they decide")
            if self._error is not None:
                raise self._error
            is_due = False
            while self._due and self._due[0] <= self.turn:
                self._due.popleft()
                is_due = True
            self.is_called = bool(self._due)
        return is_due

    def call(self) -> None:
        """Have all ranks decide together, in the next turn if all are reached in time."""
        with self._changed:
            if not self.is_called and self._error is None:
                self._bell.send(b"\0")
                self._changed.wait_for(lambda: self._due or self._error, _CALLED_WITHIN_S)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Hear no more of others; they get an error if they call."""
        self._is_over = True
        with suppress(OSError):
            self._bell.send(b"\0")

    def _is_settled(self) -> bool:
        return self._error is not None or not self._is_agreeing

    def _listen(self) -> None:
        ending = OSError("this rank decides no more")
        try:
            self._hear_calls()
        except OSError as error:
            ending = error.with_traceback(None)  # its frames have this object
        with self._changed, self._bell, self._rung:
            self._error = ending
            self._changed.notify_all()
        for link in self._links:
            link.close()

    def _hear_calls(self) -> None:
        poll = select.poll()
        links = {link.fileno(): link for link in self._links}
        for number in (self._rung.fileno(), *links):
            poll.register(number, select.POLLIN)
        while True:
            heard = [links[number] for number, _ in poll.poll() if number in links]
            if self._is_over:
                return
            for link in heard:
                link.check()
            self._agree()

    def _agree(self) -> None:
        """Find the turn. On each link a rank sends and gets a call, and then a turn."""
        links = self._links
        for link in links:
            link.tell(0)
        with self._changed:
            self._is_agreeing = self.is_called = True
        with suppress(BlockingIOError):
            self._rung.recv(1 << 10, socket.MSG_DONTWAIT)
        for link in links:
            link.heard()
        turn = self.turn
        for link in links:
            link.tell(turn)
            turn = max(turn, link.heard())
        with self._changed:
            self._due.append(turn + 1)
            self._is_agreeing = False
            self._changed.notify_all()


def linked(ranks: RankGroup, distances: Sequence[int], limit_s: float) -> list[ByteLink]:
    """Connect to the rank so far ahead, for each distance; empty if any rank could not.

    All ranks call it together.
    """
    with ExitStack() as opened:
        own = RankAddress()
        with suppress(OSError):
            host = _own_host()
            listener = opened.enter_context(socket.create_server((host, 0), backlog=ranks.size))
            port = listener.getsockname()[1]
            near = opened.enter_context(socket.socket(socket.AF_UNIX))
            near.bind(_near(host, port))
            near.listen(ranks.size)
            own = RankAddress(host, port, os.urandom(_TOKEN_BYTES).hex())
        addresses = ranks.gather(own, RankAddress)
        links: list[ByteLink] = []
        if all(address.port for address in addresses):
            with suppress(OSError):
                pairs = [
                    ((ranks.rank + far) % ranks.size, (ranks.rank - far) % ranks.size)
                    for far in distances
                ]
                ahead = [
                    opened.enter_context(_connected(addresses[to], number, own.host))
                    for number, (to, _) in enumerate(pairs)
                ]
                are_near = [addresses[source].host == own.host for _, source in pairs]
                behind = {
                    number: link
                    for is_near, listens in ((False, listener), (True, near))
                    for number, link in _accepted(
                        listens, own.token, are_near.count(is_near), opened
                    )
                }
                links = [
                    ByteLink(ahead[number], behind[number], pair, limit_s)
                    for number, pair in enumerate(pairs)
                ]
        if not all(ranks.gather(bool(links), bool)):
            return []
        opened.pop_all()
        listener.close()
        near.close()
        return links


def _closed(rank: int) -> ConnectionError:
    return ConnectionError(f"Connection closed by peer: rank {rank} has ended, or decides no more")


def _near(host: str, port: int) -> str:
    """Where ranks of the same node connect: that takes half as much of the processor as TCP."""
    return f"\0everstep-rank-{host}-{port}"


def _own_host() -> str:
    """The address that gloo uses: of the interface that the user has named, or of the host."""
    name = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24])
    host = socket.gethostbyname(socket.gethostname())
    with socket.create_server((host, 0)):
        return host


def _connected(address: RankAddress, number: int, own_host: str) -> socket.socket:
    place = (address.host, address.port)
    if address.host == own_host:
        link = socket.socket(socket.AF_UNIX)
        link.connect(_near(*place))
    else:
        link = socket.create_connection(place, timeout=_CONNECT_S)
    link.sendall(bytes.fromhex(address.token) + _OCTETS[number])
    return link


def _accepted(
    listener: socket.socket, token: str, count: int, opened: ExitStack
) -> Iterable[tuple[int, socket.socket]]:
    """The connections of `count` ranks behind, with their numbers."""
    links: dict[int, socket.socket] = {}
    until = monotonic() + _CONNECT_S
    while len(links) < count:
        listener.settimeout(max(until - monotonic(), 0.001))
        link = opened.enter_context(listener.accept()[0])
        link.settimeout(_CONNECT_S)
        octets = b""
        with suppress(OSError):
            octets = link.recv(_TOKEN_BYTES + 1, socket.MSG_WAITALL)
        if hmac.compare_digest(octets[:-1], bytes.fromhex(token)):
            links[octets[-1]] = link
        else:
            link.close()
    return links.items()
