"""Asks the server that torch has opened in a rank; its threads answer without any Python."""

import asyncio
from pathlib import Path

from trainer_sdk import layout
from trainer_sdk.bootstrap.link import ShortPath

_MOST_BYTES = 32 << 20


def has_server(folder: Path) -> bool:
    """The rank of this folder has had torch open its server."""
    return (folder / layout.WORKER_SOCKET).exists()


async def ask(folder: Path, handler: str, within_s: float) -> bytes | None:
    """What one of its handlers answers; None where there is none, or no good answer in time."""
    try:
        async with asyncio.timeout(within_s):
            answer = await _asked(str(folder / layout.WORKER_SOCKET), handler)
    except (OSError, TimeoutError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return body if head.split(b" ", 2)[1:2] == [b"200"] else None


async def _asked(path: str, handler: str) -> bytes:
    with ShortPath(path) as short:
        reader, writer = await asyncio.open_unix_connection(short)
    try:
        writer.write(
            f"POST /handler/{handler} HTTP/1.1\r\n"
            "Host: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        answer = bytearray()
        while len(answer) < _MOST_BYTES:
            part = await reader.read(1 << 18)
            if not part:
                break
            answer += part
        return bytes(answer)
    finally:
        writer.close()
