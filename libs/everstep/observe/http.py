"""Serve HTTP inside our own loop: no signals, no logging set-up, and an end within a bound."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from functools import partial
from typing import Any

import msgspec
import uvicorn

from everstep.errors import EverstepError
from everstep.observe.connections import Acceptor, BoundedConnection, ConnectionLimits, Connections
from everstep.observe.health import Health
from everstep.observe.metrics import CONTENT_TYPE, MetricRegistry

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

_BACKLOG = 1024
_JSON = "application/json"
_TWO_LENGTHS = (
    b'{"title":"Bad Request","status":400,'
    b'"detail":"the request has both Content-Length and Transfer-Encoding: send one of them"}'
)
_WARN_EVERY_S = 60.0
_WARNINGS_MOST = 100


class _Seldom(logging.Filter):
    """Passes warnings of uvicorn about clients once a minute: any client can cause them."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        # uvicorn logs requests that this server ends as errors of the application.
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False
        if record.levelno != logging.WARNING:
            return True
        said_at = self._said_at.get(record.msg)
        if said_at is not None and record.created - said_at < _WARN_EVERY_S:
            return False
        if len(self._said_at) < _WARNINGS_MOST:
            self._said_at[record.msg] = record.created
        return True


logging.getLogger("uvicorn.error").addFilter(_Seldom())


class ListenError(EverstepError):
    """An address cannot be listened on."""

    def __init__(self, host: str, port: int, error: OSError, remedy: str) -> None:
        why = {
            errno.EADDRINUSE: "something else listens there already",
            errno.EACCES: "this user may not",
            errno.EADDRNOTAVAIL: "this machine has no such address",
        }.get(error.errno or 0, error.strerror or str(error))
        super().__init__(f"cannot listen on {host}:{port}: {why}; {remedy}")
        self.host = host
        self.port = port


def listen(host: str, port: int, *, remedy: str) -> socket.socket:
    """A listening socket; `remedy` tells the operator how to choose another address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's algorithm off for accepted connections:
    # an answer has two parts, and the second would wait 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ListenError(host, port, error, remedy) from error
    listener.setblocking(False)  # noqa: FBT003  the library's signature
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the socket can be reached, as a URL without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve_asgi(
    app: AsgiApp,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    drain_within_s: float = 3.0,
    limits: ConnectionLimits | None = None,
) -> None:
    """Serve until `stop`, then let requests finish for `drain_within_s`, then cut them off.

    Owns the socket. The application's lifespan is not run: the caller owns what the
    application needs.
    """
    server = _Server(_config(app, drain_within_s), Connections(limits or ConnectionLimits()))

    async def exit_on_stop() -> None:
        await stop.wait()
        server.should_exit = True

    async with asyncio.TaskGroup() as tasks:
        server.adopting = tasks
        exiting = tasks.create_task(exit_on_stop(), name="http stop")
        try:
            await server.serve([listener])
        finally:
            exiting.cancel()
            await server.cut_off()


def observe_app(health: Health, metrics: MetricRegistry) -> AsgiApp:
    """`/healthz`: whether it can work, or why not. `/livez`: whether its loop runs. `/metrics`."""

    async def healthz() -> tuple[int, str, bytes]:
        report = await health.report()
        return 200 if report.status == "ok" else 503, _JSON, msgspec.json.encode(report)

    async def livez() -> tuple[int, str, bytes]:
        return 200, _JSON, b'{"status":"ok"}'

    async def prometheus() -> tuple[int, str, bytes]:
        return 200, CONTENT_TYPE, await metrics.exposition()

    routes = {"/healthz": healthz, "/livez": livez, "/metrics": prometheus}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        if scope["type"] != "http":
            return
        answer = routes.get(scope["path"])
        if answer is None:
            await _reply(send, 404, _JSON, b'{"title":"Not Found","status":404}')
        elif scope["method"] not in {"GET", "HEAD"}:
            await _reply(send, 405, _JSON, b'{"title":"Method Not Allowed","status":405}')
        else:
            await _reply(send, *await answer())

    return app


def _with_one_length(app: AsgiApp) -> AsgiApp:
    """Refuse requests that give their length twice, and close their connection.

    A proxy before us may believe the other length, and take the rest for a request of its own.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if names >= {b"content-length", b"transfer-encoding"}:
            await _reply(send, 400, _JSON, _TWO_LENGTHS, (b"connection", b"close"))
        else:
            await app(scope, receive, send)

    return checked


async def _reply(
    send: Send, status: int, content_type: str, body: bytes, *more: tuple[bytes, bytes]
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _config(app: AsgiApp, drain_within_s: float) -> uvicorn.Config:
    config = uvicorn.Config(
        _with_one_length(app),
        interface="asgi3",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=64 * 1024,
    )
    config.timeout_graceful_shutdown = drain_within_s  # type: ignore[assignment]  # a fraction is fine
    return config


class _Server(uvicorn.Server):
    """uvicorn's server with our own accept loop: asyncio's spins and fills the log on `EMFILE`."""

    adopting: asyncio.TaskGroup

    def __init__(self, config: uvicorn.Config, among: Connections) -> None:
        super().__init__(config)
        self._among = among
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        for listener in sockets or []:
            listener.listen(_BACKLOG)
            self._acceptors.append(Acceptor(listener, self._among, self._adopt))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop_accepting()
        await super().shutdown(sockets)

    def _adopt(self, connected: socket.socket) -> None:
        taking = self._take(connected)
        try:
            self.adopting.create_task(taking, name="http connection")
        except RuntimeError:  # a neighbour has failed, and we are at the end
            taking.close()
            connected.close()

    async def _take(self, connected: socket.socket) -> None:
        made = partial(
            BoundedConnection,
            among=self._among,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(made, connected)
        except OSError as error:  # the client is gone already
            connected.close()
            log.debug("connection_not_taken error=%s", error)

    def _stop_accepting(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield  # signals belong to everstep.runtime

    async def cut_off(self) -> None:
        """End what is left, also when the server was cancelled and could not shut down."""
        self._stop_accepting()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        left = list(self.server_state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
