"""How far a rank is in its collectives, as torch's worker server says, GIL or no GIL."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainer_sdk import layout
from trainer_sdk.bootstrap.link import ShortPath

_REQUEST = (
    b"POST /handler/fr_trace_json?onlyactive=true&includestacktraces=false HTTP/1.1\r\n"
    b"Host: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
_WITHIN_S = 2.0
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Collectives:
    """What the flight recorder of one rank says."""

    entered: int
    """How many it has entered, over all process groups."""
    waits_in: str
    """The oldest that it is in; empty for none."""


class _Group(msgspec.Struct):
    last_enqueued_collective: int | str = -1
    last_completed_collective: int | str = -1


class _Entry(msgspec.Struct):
    profiling_name: str = ""
    process_group: tuple[str, ...] = ()
    retired: bool = True


class _Trace(msgspec.Struct):
    entries: list[_Entry] = []
    pg_status: Mapping[str, _Group] = {}


async def read_collectives(folder: Path) -> Collectives | None:
    """Ask a rank's worker server; None where it has none, or does not answer soon."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            answer = await _asked(str(folder / layout.WORKER_SOCKET))
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return parse_collectives(body) if b" 200 " in head.partition(b"\r\n")[0] + b" " else None


def parse_collectives(body: bytes) -> Collectives | None:
    """What a flight recorder's trace shows; None if it is none."""
    try:
        trace = _TRACE.decode(body)
        entered = sum(max(0, int(one.last_enqueued_collective)) for one in trace.pg_status.values())
    except (msgspec.MsgspecError, ValueError):
        return None
    for entry in trace.entries:
        if not entry.retired:
            group = entry.process_group[-1] if entry.process_group else ""
            return Collectives(entered, f"{entry.profiling_name} of {group}".removesuffix(" of "))
    return Collectives(entered, "")


async def _asked(path: str) -> bytes:
    with ShortPath(path) as short:
        reader, writer = await asyncio.open_unix_connection(short)
    try:
        writer.write(_REQUEST)
        answer = bytearray()
        while len(answer) < _MOST_BYTES:
            part = await reader.read(1 << 18)
            if not part:
                break
            answer += part
        return bytes(answer)
    finally:
        writer.close()


_TRACE = msgspec.json.Decoder(_Trace)
