"""Serve HTTP inside our own loop: no signals, no logging set-up, and an end within a bound."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

import msgspec
import uvicorn

from everstep.errors import EverstepError
from everstep.observe.health import Health
from everstep.observe.metrics import CONTENT_TYPE, Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_JSON = "application/json"


def _is_no_cut_off(record: logging.LogRecord) -> bool:
    # uvicorn shows the requests that we end ourselves as errors of the application.
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


logging.getLogger("uvicorn.error").addFilter(_is_no_cut_off)


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
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
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
) -> None:
    """Serve until `stop`, then let requests finish for `drain_within_s`, then cut them off.

    Owns the socket. The application's lifespan is not run: whoever calls this owns what the
    application needs.
    """
    server = _Server(_config(app, drain_within_s))

    async def exit_on_stop() -> None:
        await stop.wait()
        server.should_exit = True

    async with asyncio.TaskGroup() as tasks:
        exiting = tasks.create_task(exit_on_stop(), name="http stop")
        try:
            await server.serve([listener])
        finally:
            exiting.cancel()
            await server.cut_off()


def observe_app(health: Health, metrics: Metrics) -> AsgiApp:
    """`/healthz`: can it work, and if not, why. `/livez`: does its loop turn. `/metrics`."""

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


async def _reply(send: Send, status: int, content_type: str, body: bytes) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _config(app: AsgiApp, drain_within_s: float) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=1000,
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=64 * 1024,
    )
    config.timeout_graceful_shutdown = drain_within_s  # type: ignore[assignment]  # a fraction is fine
    return config


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield  # signals belong to everstep.runtime

    async def cut_off(self) -> None:
        """End what is left, also when the server was cancelled and could not shut down."""
        for server in getattr(self, "servers", []):
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        left = list(self.server_state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
