"""A connection to the bus that can be cut, blocked and slowed, between agent and server."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

_BLOCK_BYTES = 1 << 16
_DEFAULT_PORT = 4222
_LOOPBACK = "127.0.0.1"
_HELLO = b"INFO "


class Relay:
    """Passes bytes on, both ways, until it is asked to stop. Use `opened_relay`."""

    def __init__(self, servers: list[tuple[str, int]]) -> None:
        self._servers = servers
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._passes = asyncio.Event()
        self._passes.set()
        self.delay_s = 0.0
        """The delay of each piece."""

    def cut(self) -> None:
        """Close every connection, and refuse new ones."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def block(self) -> None:
        """Let nothing pass, and keep the connections."""
        self._passes.clear()

    def join(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def unblock(self) -> None:
        """Let everything pass again, waiting bytes first."""
        self._passes.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the agent."""
        self._writers.add(writer)
        try:
            if not self._is_cut:
                await self._join(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        answers, asks = await self._connected()
        self._writers.add(asks)
        try:
            with contextlib.suppress(OSError):
                hello = await answers.readline()
                writer.write(without_others(hello))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pass_on(reader, asks))
                    tasks.create_task(self._pass_on(answers, writer))
        finally:
            self._writers.discard(asks)
            asks.transport.abort()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        trouble: OSError | None = None
        for host, port in self._servers:
            try:
                return await asyncio.open_connection(host, port)
            except OSError as error:
                trouble = error
        raise ConnectionError("no server of the bus can be reached") from trouble

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_BLOCK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._passes.wait()
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()


def servers_of(url: str) -> list[tuple[str, int]] | None:
    """The addresses of the servers; None if one of them requires TLS, which detects a relay."""
    parts = [urlsplit(part.strip()) for part in url.split(",") if part.strip()]
    if any(part.scheme != "nats" for part in parts):
        return None
    return [(part.hostname or _LOOPBACK, part.port or _DEFAULT_PORT) for part in parts]


def without_others(hello: bytes) -> bytes:
    """The server's first line, without its neighbours, which would be ways around the relay."""
    if not hello.startswith(_HELLO):
        return hello
    info = json.loads(hello[len(_HELLO) :])
    info.pop("connect_urls", None)
    return _HELLO + json.dumps(info).encode() + b"\r\n"


@asynccontextmanager
async def opened_relay(servers: list[tuple[str, int]]) -> AsyncIterator[tuple[Relay, str]]:
    """A relay to these servers, and the URL under which the agent reaches it."""
    relay = Relay(servers)
    running: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as tasks:

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = tasks.create_task(_served(relay, reader, writer))
            running.add(task)
            task.add_done_callback(running.discard)

        server = await asyncio.start_server(accept, _LOOPBACK, 0)
        try:
            yield relay, f"nats://{_LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in running:
                task.cancel()


async def _served(relay: Relay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await relay.serve(reader, writer)
