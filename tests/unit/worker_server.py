"""Answers as the server that torch opens in a rank does, from what a test has put down."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from trainer_sdk import layout

Answers = Mapping[str, Callable[[], bytes | None]]
"""By the beginning of the handler's name; None is an answer that never comes."""


_PARAMETERS = re.compile(r"((onlyactive|includecollectives)=(true|false)&?)*")
_OF_DEVICES = {"dump_nccl_trace_json", "torchcomms_fr_trace_json", "torch_comms_fr_trace_json"}


def _reply(name: str, answers: Answers) -> tuple[bytes, bytes | None]:
    """The status and the answer; a device's recorder refuses parameters that it does not know."""
    handler, _, parameters = name.partition("?")
    if not name:
        return b"200 OK", json.dumps(sorted({one.partition("?")[0] for one in answers})).encode()
    if handler in _OF_DEVICES and _PARAMETERS.fullmatch(parameters) is None:
        return b"400 Bad Request", b"Invalid parameters - unexpected param passed in"
    known = next((answer for start, answer in answers.items() if name.startswith(start)), None)
    return (b"404 Not Found", b"there is none") if known is None else (b"200 OK", known())


@asynccontextmanager
async def worker_server(folder: Path, answers: Answers) -> AsyncIterator[list[str]]:
    """What was asked for, in its order."""
    asked: list[str] = []
    closing = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            name = head.split(b" ")[1].decode().removeprefix("/handler/")
            asked.extend([name] if name else [])
            status, body = _reply(name, answers)
            if body is None:
                await closing.wait()
                return
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
