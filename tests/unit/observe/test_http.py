"""The pages that a process serves inside its own loop, and how it stops serving."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from operator import not_

import httpx2
import psutil
import pytest

from everstep.errors import EverstepError
from everstep.observe.connections import BoundedConnection
from everstep.observe.http import (
    AsgiApp,
    ListenError,
    Receive,
    Scope,
    Send,
    listen,
    observe_app,
    serve_asgi,
    url_of,
)
from everstep.observe.metrics import MetricRegistry
from everstep.runtime import serve
from tests.unit.observed import HandClock, broken, buggy, fine, health_of
from tests.waiting import turns, until_async


@contextmanager
def listening() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0, remedy="wait") as listener:
        yield listener


@asynccontextmanager
async def served(app: AsgiApp, drain_within_s: float = 3.0):  # type: ignore[no-untyped-def]
    stop = asyncio.Event()
    with listening() as listener:
        url = url_of(listener)
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_asgi(app, listener, stop, drain_within_s=drain_within_s))
            async with httpx2.AsyncClient(base_url=url, trust_env=False) as client:
                yield client, stop
            stop.set()


async def test_the_three_pages_and_nothing_else() -> None:
    app = observe_app(health_of(HandClock(), bus=fine), MetricRegistry("history"))
    async with served(app) as (client, _):
        healthy = await client.get("/healthz")
        assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")
        assert healthy.json()["checks"]["bus"] == {"ok": True, "reason": "", "took_ms": 0.0}
        assert healthy.json()["version"] == "1.2.3"
        assert "server" not in healthy.headers
        alive = await client.get("/livez")
        assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "everstep_build_info" in metrics.text
        for path in ("/", "/healthz/", "/docs", "/../etc/passwd", "/metrics?x=1/../y"):
            expected = 200 if path.startswith("/metrics") else 404
            assert (await client.get(path)).status_code == expected
        assert (await client.post("/healthz")).status_code == 405
        head = await client.head("/livez")
        assert (head.status_code, head.text) == (200, "")


async def test_no_part_of_an_answer_waits_for_an_acknowledgement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nagle's algorithm is off: with it, each answer took 40 ms more (A11.6)."""
    options: list[int] = []
    made = BoundedConnection.connection_made

    def connection_made(self: BoundedConnection, transport: asyncio.Transport) -> None:
        accepted = transport.get_extra_info("socket")
        options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(BoundedConnection, "connection_made", connection_made)
    app = observe_app(health_of(HandClock()), MetricRegistry("history"))
    async with served(app) as (client, _):
        assert (await client.get("/livez")).status_code == 200
    assert options
    assert all(options)


async def test_a_failing_check_is_503_with_the_reason() -> None:
    app = observe_app(health_of(HandClock(), bus=broken, disk=buggy), MetricRegistry("history"))
    async with served(app) as (client, _):
        answer = await client.get("/healthz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["bus"]["reason"] == "no server at nats://u:***@h:1"
        assert "private" not in answer.text
        assert (await client.get("/livez")).status_code == 200


async def test_it_stops_within_its_bound_with_open_connections() -> None:
    ended = list[str]()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stream")

    async with served(stream, drain_within_s=0.05) as (client, stop):
        host, port = client.base_url.host, client.base_url.port
        _, idle = await asyncio.open_connection(host, port)
        async with client.stream("GET", "/") as response:
            chunks = response.aiter_bytes()
            assert await anext(chunks) == b"x"
            stop.set()
            with pytest.raises(httpx2.HTTPError):  # cut off, not ended
                await anext(chunks)
        idle.close()
        await idle.wait_closed()
    assert ended == ["stream"]


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    full = asyncio.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            full.set()
            body = {"type": "http.response.body", "body": bytes(1 << 20), "more_body": True}
            await send(body)

    stop = asyncio.Event()
    with listening() as listener:
        host, port = listener.getsockname()
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve_asgi(flood, listener, stop, drain_within_s=0.05))
            with socket.create_connection((host, port)) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await full.wait()
                stop.set()
                await serving
                await until_async(lambda: sockets_at(port), "none is open", holds=not_)


def sockets_at(port: int) -> list[object]:
    """Of this process, its clients' not."""
    mine = psutil.Process().net_connections("tcp")
    return [one for one in mine if one.laddr.port == port]


async def test_it_leaves_no_task_and_no_port_when_a_neighbour_fails() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    async def failing() -> None:
        await turns()
        raise EverstepError("neighbour")

    with listening() as listener:
        host, port = listener.getsockname()
        with pytest.raises(ExceptionGroup):
            await serve(failing, stop=asyncio.Event(), drains=[partial(serve_asgi, app, listener)])
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with listen(host, port, remedy="wait"):
        pass


def test_a_taken_port_is_one_clear_line() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError) as caught:
            listen("127.0.0.1", port, remedy="choose another with --api-port")
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: something else listens there already; "
        f"choose another with --api-port"
    )
