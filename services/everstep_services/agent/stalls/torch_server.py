"""Asks the server that torch has opened in a rank; its threads answer without Python."""

import asyncio
import errno
from pathlib import Path

import msgspec

from everstep.errors import EverstepError
from everstep.evidence.archive import unanswered
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import ShortPath

_MOST_BYTES = 32 << 20


class TorchServerError(EverstepError):
    """The server of a rank has not answered, or has answered badly."""


def has_server(folder: Path) -> bool:
    """Whether torch has opened its server in the rank of this folder."""
    return (folder / layout.WORKER_SOCKET).exists()


async def ask(folder: Path, handler: str, within_s: float) -> bytes | None:
    """The answer of one of its handlers; None without a server, or a good answer in time."""
    try:
        return await answer(folder, handler, within_s)
    except TorchServerError:
        return None


async def answer(folder: Path, handler: str, within_s: float) -> bytes:
    """The answer of one of its handlers; `TorchServerError` says why there is no good one."""
    return await _answer(folder, f"POST /handler/{handler}", within_s)


async def handlers(folder: Path, within_s: float) -> frozenset[str]:
    """The names of its handlers; `TorchServerError` if it does not list them."""
    try:
        return _NAMES.decode(await _answer(folder, "GET /handler/", within_s))
    except msgspec.MsgspecError as error:
        raise TorchServerError(f"torch's server in it lists no handlers: {error}") from None


async def _answer(folder: Path, request: str, within_s: float) -> bytes:
    try:
        async with asyncio.timeout(within_s):
            reply = await _asked(str(folder / layout.WORKER_SOCKET), request)
    except TimeoutError:
        raise TorchServerError(unanswered(within_s)) from None
    except OSError as error:
        # ENOTCONN: its queue of connections is full, so that the connection was never made
        state = "accepts no connection" if error.errno == errno.ENOTCONN else "is gone"
        raise TorchServerError(f"torch's server in it {state}: {error.strerror}") from error
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        line = head.partition(b"\r\n")[0][:60].decode(errors="replace")
        raise TorchServerError(f"torch's server in it refused: {line or 'it said nothing'}")
    return body


async def _asked(path: str, request: str) -> bytes:
    with ShortPath(path) as short:
        reader, writer = await asyncio.open_unix_connection(short)
    try:
        writer.write(
            f"{request} HTTP/1.1\r\n"
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


_NAMES = msgspec.json.Decoder(frozenset[str])
