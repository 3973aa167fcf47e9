"""Connections that ask nothing keep nobody from asking: real sockets, few descriptors (A13.3)."""

import asyncio
import os
import resource
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from everstep.bus import connect, topology
from everstep.bus.server.dev_server import DevServer
from everstep.observe.connections import ConnectionLimits, raise_descriptor_limit
from everstep.observe.http import AsgiApp, Receive, Scope, Send, listen, serve_asgi, url_of
from tests.e2e.ports import free_port
from tests.waiting import WITHIN_S, until_async

HELLO = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without looking at the body, as for a bad token."""
    del scope, receive
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served(limits: ConnectionLimits, app: AsgiApp = hello) -> AsyncIterator[str]:
    stop = asyncio.Event()
    listener = listen("127.0.0.1", 0, remedy="")
    if app is not hello:  # the kernel keeps no answer for us
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    url = url_of(listener)
    async with asyncio.timeout(2 * WITHIN_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_asgi(app, listener, stop, drain_within_s=0.1, limits=limits))
        yield url
        stop.set()


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        return  # cut, which is what the tests are about


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    try:
        while more := await reader.read(4096):
            found += more
    except ConnectionResetError:
        return found
    return found


async def cut(
    url: str, first: bytes, then: Callable[[asyncio.StreamWriter], Awaitable[None]]
) -> bytes:
    """What was answered before the server closed a connection that is slow at something."""
    reader, writer = await opened(url)
    writer.write(first)
    dripping = asyncio.ensure_future(then(writer))
    try:
        return await rest(reader)
    finally:
        dripping.cancel()
        await closed(writer)


async def drip(writer: asyncio.StreamWriter) -> None:
    """A byte now and then: a timer that begins again with each would never end."""
    while not writer.is_closing():
        writer.write(b"x")
        with suppress(TimeoutError):  # its pace
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()


async def nothing(_: asyncio.StreamWriter) -> None:
    """Says no more."""


@pytest.mark.parametrize("then", [nothing, drip])
@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX: ", HELLO], ids=["", "head", "body"])
async def test_who_is_slow_is_cut(
    first: bytes, then: Callable[[asyncio.StreamWriter], Awaitable[None]]
) -> None:
    # Whoever sends a whole head must not be cut before it: the test may be slow at sending it.
    headers_within_s = 2 * WITHIN_S if first == HELLO else 0.2
    limits = ConnectionLimits(most=10, headers_within_s=headers_within_s, body_within_s=0.2)
    async with served(limits) as url:
        answered = await cut(url, first, then)
        assert answered.startswith(b"HTTP/1.1 200" if first == HELLO else b"")


@pytest.mark.parametrize("asked", [b"", b"Connection: close\r\n"], ids=["kept", "closing"])
@pytest.mark.parametrize("kib", [24, 200, 5000])
async def test_who_does_not_take_an_answer_is_cut(
    asked: bytes, kib: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that fits into our buffers, and one after which the connection is to be closed."""

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        for part in range(2):
            body = {"type": "http.response.body", "body": b"x" * kib * 512, "more_body": not part}
            if not part:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await send(body)

    limits = ConnectionLimits(most=10, answer_taken_within_s=0.3)
    async with served(limits, large) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (host, int(port)))
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n" + asked + b"\r\n")
            await until_async(lambda: "an answer was not taken" in caplog.text, "it is cut")


async def test_a_request_with_two_lengths_is_refused_and_no_other_follows_it() -> None:
    """A proxy that believes the other length would let a stranger's request through (A13.3)."""
    sent = (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    async with served(ConnectionLimits()) as url:
        reader, writer = await opened(url)
        writer.write(sent)
        answer = await rest(reader)
        await closed(writer)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_one_connection_too_many_cuts_the_oldest_that_asks_nothing() -> None:
    async with served(ConnectionLimits(most=3)) as url, AsyncExitStack() as stack:
        idle = [await opened(url) for _ in range(3)]
        for _, writer in idle:
            stack.push_async_callback(closed, writer)
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=WITHIN_S) as client:
            for _ in range(5):  # and keeps a connection that has asked before
                assert (await client.get("/")).text == "ok"
                stack.push_async_callback(closed, (await opened(url))[1])
        assert await rest(idle[0][0]) == b""


async def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))


@asynccontextmanager
async def history(nats: DevServer, folder: Path, port: int, metrics: int) -> AsyncIterator[Process]:
    bus = nats.settings("service")
    log = await asyncio.to_thread((folder / "history.log").open, "wb")
    ours = {
        "EVERSTEP_BUS__URL": bus.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(bus.credentials_file),
        "EVERSTEP_HISTORY__DATABASE_URL": f"sqlite:///{folder / 'history.db'}",
        "EVERSTEP_API__PORT": str(port),
        "EVERSTEP_API__FIRST_TOKEN_FILE": str(folder / "token"),
        "EVERSTEP_OBSERVE__PORT": str(metrics),
    }
    environ = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")} | ours
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "everstep_services.history"),
        env=environ,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=log,
        preexec_fn=few_descriptors,
    )
    try:
        yield process
    finally:
        log.close()
        if process.returncode is None:
            process.terminate()
        await process.communicate()


@pytest.mark.timeout(240)
async def test_idle_connections_without_a_token_stall_nothing_and_fill_no_log(
    nats: DevServer, tmp_path: Path
) -> None:
    async with connect(nats.settings("admin"), "setup") as bus:
        await topology.init(bus.jetstream)
    port, metrics = free_port(), free_port()
    async with (
        history(nats, tmp_path, port, metrics) as process,
        httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False, timeout=WITHIN_S
        ) as client,
    ):

        async def answers() -> bool:
            assert process.returncode is None, "it ended"
            token = await asyncio.to_thread((tmp_path / "token").read_text)
            client.headers["Authorization"] = f"Bearer {token.strip()}"
            status: Any = (await client.get("status")).json()
            return bool(status["is_projecting"])

        retried = (OSError, httpx2.HTTPError)
        await until_async(answers, "it projects", despite=retried, within_s=2 * WITHIN_S)
        idle: list[socket.socket] = []
        try:
            for _ in range(400):
                idle.append(await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port)))
                if len(idle) % 40 == 0:
                    assert await answers()
            async with httpx2.AsyncClient(trust_env=False, timeout=WITHIN_S) as observer:
                page = (await observer.get(f"http://127.0.0.1:{metrics}/metrics")).text
        finally:
            for one in idle:
                one.close()
        assert await answers()
        assert "everstep_history_retries_total 0.0" in page
        assert "everstep_bus_reconnects_total 0.0" in page
    log = await asyncio.to_thread((tmp_path / "history.log").read_text)
    assert log.count("connections_cut") == 1
    assert len(log) < 20_000, log
