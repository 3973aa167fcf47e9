"""Answers as the server that torch opens in a rank does, from what a test has put down."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from trainer_sdk import layout

Answers = Mapping[str, Callable[[], bytes | None]]
"""By the beginning of the handler's name; None is an answer that never comes."""


@asynccontextmanager
async def worker_server(folder: Path, answers: Answers) -> AsyncIterator[list[str]]:
    """What was asked for, in its order."""
    asked: list[str] = []
    closing = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            name = head.split(b" ")[1].decode().removeprefix("/handler/")
            asked.append(name)
            known = next((one for start, one in answers.items() if name.startswith(start)), None)
            body = b"there is none" if known is None else known()
            if body is None:
                await closing.wait()
                return
            status = b"404 Not Found" if known is None else b"200 OK"
            writer.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n" + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # who has asked does not wait any longer
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, str(folder / layout.WORKER_SOCKET))
    try:
        yield asked
    finally:
        closing.set()
        server.close()
        await server.wait_closed()
