"""Targets of notifications: real HTTP servers that answer, refuse, hang or are away as told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Behaviour = Literal["hang", "drop", "late text"] | tuple[int, dict[str, str]]


@dataclass
class Heard:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def key(self) -> str:
        return self.headers["idempotency-key"]


@dataclass
class TargetServer:
    """Takes everything, but for the first requests, which it treats as its plan says."""

    plan: list[Behaviour] = field(default_factory=list)
    status: int = 202
    heard: list[Heard] = field(default_factory=list)
    taken: list[Heard] = field(default_factory=list)
    before_answer: Callable[[], Awaitable[None]] | None = None
    when_it_hangs: Callable[[], None] | None = None
    """Called once a request was read that gets no answer."""
    port: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Listen; at the same port as before, if it was up already."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for writer in list(self._writers):
                writer.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            heard = await _read(reader)
            self.heard.append(heard)
            await self._answer(heard, reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self._writers.discard(writer)

    async def _answer(
        self, heard: Heard, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        behaviour = self.plan.pop(0) if self.plan else (self.status, {})
        if self.before_answer is not None:
            await self.before_answer()
        if behaviour == "drop":
            return
        if behaviour == "hang":
            if self.when_it_hangs is not None:
                self.when_it_hangs()
            await reader.read()  # until the client has had enough
            return
        if behaviour == "late text":
            self.taken.append(heard)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
            await reader.read()
            return
        assert isinstance(behaviour, tuple)
        status, headers = behaviour
        if 200 <= status < 300:
            self.taken.append(heard)
        lines = [
            f"HTTP/1.1 {status} Said",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        body = b'{"status": "as told"}'
        lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Heard:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Heard(method, path, headers, body)
