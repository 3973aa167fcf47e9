"""Workarounds for the client library, nats-py; each names the defect that it works around.

`PatchedClient` repairs the client, `FrameParser` replaces its parser, `settle` and `dispose` do
what its `flush` and `close` leave undone. ADR 0066 says when each patch can be removed.
"""

import asyncio
import errno
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from math import ceil
from ssl import SSLContext
from typing import Any, Protocol, TypeVar

import msgspec
from nats import errors as nats_errors
from nats.aio.client import PING_PROTO, PONG_PROTO, Client, Srv
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport, Transport
from nats.micro.service import Service
from nats.protocol.parser import AWAITING_CONTROL_LINE, CRLF_SIZE, Parser

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_WITHIN_S = 2.0
_INFO = b"INFO "
Hear = Callable[[str, str, bytes], object]
"""Handles the subject, the reply subject and the body of a message at once."""
OnServers = Callable[[Collection[str], bool], None]
"""Hears at which addresses clients reach the server and those that it reaches, and whether this is
its first report on the connection."""

_PLAIN = re.compile(rb"MSG (\S+) (\d+) (?:(\S+) )?(\d+)\r\n")


class Hearing(Protocol):
    """The part of the client that the parser uses."""

    stats: dict[str, int]

    def hear_of(self, sid: int) -> Hear | None:
        """Return the direct handler of a subscription's plain messages, if it may be called now."""

    async def hear_failed(self, error: Exception) -> None: ...


class FrameParser(Parser):
    """nats-py's parser, with a fast path for plain messages, those without headers.

    Health receives a beat a second from each node. nats-py copies each message twice, matches it
    with up to seven patterns, and awaits its handler: half of the cost of a beat. Here a plain
    message that has arrived completely is handled in place; everything else goes through
    nats-py, in order. Each client has its own parser.
    """

    def __init__(self, client: Hearing) -> None:
        super().__init__(client)
        self._client = client

    async def parse(self, data: bytes = b"") -> None:
        """Handle plain, complete messages; pass the rest to nats-py, a line or body at a time."""
        at, buffer = 0, self.buf
        while at < len(data) and self.buf is buffer:  # nats-py replaces it on a new connection
            if not buffer and self.state == AWAITING_CONTROL_LINE:
                at, error = self._hear_plain(data, at)
                if error is not None:  # it must not end the connection
                    await self._client.hear_failed(error)
                    continue
                if at == len(data):
                    return
            end = self._end(data, at)
            await super().parse(data[at:end])
            at = end

    def _hear_plain(self, data: bytes, at: int) -> tuple[int, Exception | None]:
        """Handle plain messages up to the first that fails; return where the rest begins."""
        hear_of, stats, most = self._client.hear_of, self._client.stats, len(data) - CRLF_SIZE
        of: bytes | None = None
        hear: Hear | None = None
        while (plain := _PLAIN.match(data, at)) is not None:
            subject, sid, reply, size = plain.groups(b"")
            if sid != of:  # nothing else can have queued a message meanwhile
                of, hear = sid, hear_of(int(sid))
            begin = plain.end()
            end = begin + int(size)
            if hear is None or end > most:
                break
            stats["in_msgs"] += 1
            stats["in_bytes"] += end - begin
            at = end + CRLF_SIZE
            try:
                hear(subject.decode(), reply.decode(), data[begin:end])
            except Exception as error:  # noqa: BLE001
                return at, error
        return at, None

    def _end(self, data: bytes, at: int) -> int:
        """Return the end of the line or body that begins there or began before."""
        if self.state == AWAITING_CONTROL_LINE:
            return data.find(b"\n", at) + 1 or len(data)
        return at + self.needed + CRLF_SIZE - len(self.buf)


_CLUSTER_PING_S = 2.0
"""A client that knows other servers leaves one that hangs after three of these times."""


class PatchedClient(Client):
    """nats-py's client with eleven patches.

    1. It sends no password to a server without TLS when TLS was asked for.
    2. A server that dies before its INFO line counts as lost, not as a foreign protocol.
    3. A PONG whose caller was cancelled does not break the connection for all others.
    4. A task that is cancelled while it waits for a write is cancelled.
    5. A task that is cancelled while a connection attempt fails is cancelled.
    6. Messages that a server sends before it answers CONNECT are handled, not taken for the answer.
    7. Messages without headers are handled without a queue and a task for each subscription.
    8. It waits a random time after each attempt to reconnect that fails: nats-py's waits are all
       the same, and a fleet would storm a server that was away for long.
    9. It aborts a lost connection: nats-py waits for the server to close TLS, 30 s if it hangs.
    10. TLS is started by asyncio's own means, which knows then that the stream is encrypted.
    11. It tries the server last that it has just left, and reports which servers there are.
    """

    def __init__(self, spread_s: float = 0.0, on_servers: OnServers | None = None) -> None:
        super().__init__()
        self._spread_s = spread_s
        self._on_servers = on_servers
        self._left: dict[str, float] = {}
        self._ps = FrameParser(self)
        self._hears: dict[int, tuple[Subscription, Hear]] = {}
        self._cancelled: Callable[[], bool] = _never

    def hear_at_once(self, subscription: Subscription, hear: Hear) -> None:
        """Pass messages without headers to `hear` as they arrive, in their order."""
        self._hears[subscription._id] = subscription, hear  # noqa: SLF001

    def hear_of(self, sid: int) -> Hear | None:
        """Return the direct handler; None while earlier messages wait in the queue."""
        entry = self._hears.get(sid)
        return None if entry is None or entry[0].pending_msgs else entry[1]

    async def hear_failed(self, error: Exception) -> None:
        """Report the error as nats-py does: a failing handler must not end the connection."""
        await self._error_cb(error)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        hear = None if headers else self.hear_of(sid)
        if hear is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            hear(subject.decode(), reply.decode(), data)
        except Exception as error:  # noqa: BLE001
            await self.hear_failed(error)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._hears.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _flush_pending(self, force_flush: bool = False) -> object:
        return await _cancellable(super()._flush_pending(force_flush))

    async def flush(self, timeout: int = 10) -> None:
        await _cancellable(super().flush(timeout))

    async def connect(self, *args: Any, **options: Any) -> None:
        self._cancelled = _cancelled_since()
        try:
            await _cancellable(super().connect(*args, **options))
        finally:
            self._cancelled = _never

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            # A future that nobody awaits takes its place: each PONG answers one PING, in order.
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _connect_to_server(self, s: Srv) -> None:
        self._go_on()
        _abort(self._transport)  # of a handshake that failed
        try:
            await super()._connect_to_server(s)
        except Exception:
            if self.is_reconnecting:
                await asyncio.sleep(random.uniform(0, self._spread_s))  # noqa: S311
            raise

    def _go_on(self) -> None:
        """Let nats-py try again: it takes an attempt that is cancelled for one that failed."""
        if self._cancelled():
            raise asyncio.CancelledError

    async def _process_connect_init(self) -> None:
        self._go_on()
        transport = self._transport
        assert isinstance(transport, TcpTransport)
        line_of = partial(self._line_of, type(transport), transport, iter([True]))
        transport.readline = line_of  # type: ignore[method-assign]
        transport.connect_tls = partial(_start_tls, transport)  # type: ignore[method-assign]
        await super()._process_connect_init()

    async def _line_of(
        self, kind: type[Transport], transport: Transport, is_first: Iterator[bool]
    ) -> bytes:
        """Return the next line of a server during the handshake.

        The first line is INFO. Before its answer, a busy server may send INFO again, or a PING;
        nats-py takes either for the answer, and then never sends anything.
        """
        expects_info = next(is_first, False)
        while True:
            line = bytes(await kind.readline(transport))
            if not line:
                raise ConnectionResetError(
                    errno.ECONNRESET, "the server closed the connection during the handshake"
                )
            if expects_info or not line.startswith((_INFO, PING_PROTO)):
                return line
            if line == PING_PROTO:
                transport.write(PONG_PROTO)
            else:
                await self._process_info(msgspec.json.decode(line.removeprefix(_INFO)))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        await super()._process_info(info, initial_connection)
        servers = info.get("connect_urls") or ()
        if len(servers) > 1:
            self.options["ping_interval"] = min(self.options["ping_interval"], _CLUSTER_PING_S)
        if self._on_servers is not None:
            self._on_servers(servers, initial_connection)

    async def leave_queues(self) -> None:
        """Take no more messages of queue groups until the client has reconnected."""
        for sid, subscription in list(self._subs.items()):
            if subscription._queue:  # noqa: SLF001
                await self._send_unsubscribe(sid)

    async def move(self, to: str | None) -> None:
        """Leave this server for the one at that address, or for any other."""
        if to is not None:
            self._left[to] = -1.0
        await self.force_reconnect()

    async def _attempt_reconnect(self) -> None:
        if self._current_server is not None:
            self._left[self._current_server.uri.netloc] = time.monotonic()
        _abort(self._transport)
        await super()._attempt_reconnect()

    async def _select_next_server(self) -> None:
        self._server_pool.sort(key=self._left_at)
        await super()._select_next_server()

    def _left_at(self, server: Srv) -> float:
        """When it was lost or could not be reached; a server that we should move to comes first."""
        failed = server.last_attempt if server.reconnects else None
        return max(self._left.get(server.uri.netloc, 0.0), failed or -1.0)

    def _connect_command(self) -> bytes:
        if self.options.get("tls") and not self._server_info.get("tls_required"):
            raise nats_errors.SecureConnWantedError
        return bytes(super()._connect_command())


async def _start_tls(
    transport: TcpTransport, host: str, context: SSLContext, _buffer: int, within_s: float
) -> None:
    assert transport._io_writer is not None  # noqa: SLF001
    async with asyncio.timeout(within_s):
        await transport._io_writer.start_tls(context, server_hostname=host)  # noqa: SLF001


def _abort(transport: Transport | None) -> None:
    writer = getattr(transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()


async def _cancellable(waiting: Awaitable[T]) -> T:
    """Await nats-py, and raise the cancellation that it may have swallowed."""
    cancelled = _cancelled_since()
    answer = await waiting
    if cancelled():
        raise asyncio.CancelledError
    return answer


def _cancelled_since() -> Callable[[], bool]:
    """Return a function that tells whether this task was cancelled after this call."""
    task = asyncio.current_task()
    if task is None:
        return _never
    before = task.cancelling()
    return lambda: task.cancelling() > before


def _never() -> bool:
    return False


def answer_at_once(client: Client, service: Service, hear: Hear) -> None:
    """Pass questions at the newest endpoint of a service to `hear`, and count them there."""
    endpoint = service._endpoints[-1]  # noqa: SLF001

    def counted(subject: str, reply: str, data: bytes) -> None:
        endpoint._num_requests += 1  # noqa: SLF001
        hear(subject, reply, data)

    if isinstance(client, PatchedClient) and endpoint._subscription is not None:  # noqa: SLF001
        client.hear_at_once(endpoint._subscription, counted)  # noqa: SLF001


async def settle(client: Client, within_s: float) -> None:
    """Wait until the server has seen all that was sent before this call."""
    async with asyncio.timeout(within_s):
        # nats-py's own flush writes its PING ahead of data that still waits to be written
        await client._flush_pending(force_flush=True)  # noqa: SLF001  nothing public does this
        await client.flush(timeout=ceil(within_s))


async def dispose(client: Client) -> None:
    """Close the client within a bound, and leave no task of it behind."""
    client.options["allow_reconnect"] = False
    try:
        async with asyncio.timeout(_CLOSE_WITHIN_S):
            if client.is_connected:
                await settle(client, 1)
            await client.close()
    except (TimeoutError, nats_errors.Error, OSError, AssertionError) as error:
        # nats-py asserts when it never had a connection
        log.debug("bus_close_failed error=%s", error)
    finally:
        await _clear_away(client)


async def _clear_away(client: Client) -> None:
    """What nats-py's `close` leaves behind when the server is not there.

    A reconnect that was just succeeding swallows the cancellation, goes on, and starts new
    tasks on the closed client; so look again until there is nothing left.
    """
    for _ in range(20):
        client._status = Client.CLOSED  # noqa: SLF001
        left = [
            task
            for task in (
                client._reconnection_task,  # noqa: SLF001
                client._reading_task,  # noqa: SLF001
                client._ping_interval_task,  # noqa: SLF001
                client._flusher_task,  # noqa: SLF001
            )
            if task is not None and not task.done()
        ]
        if not left:
            break
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)
    _abort(client._transport)  # noqa: SLF001
