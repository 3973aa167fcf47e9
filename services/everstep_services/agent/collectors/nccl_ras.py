"""The answer of NCCL's RAS: it knows all ranks of the job, so the agent of rank 0 asks for all."""

import asyncio
from asyncio import StreamReader, StreamWriter

from everstep.clock import Clock
from everstep.evidence import nccl_ras
from everstep_services.agent.collectors.collection import (
    EvidenceFound,
    NothingFoundError,
    Scene,
    short,
)

_ADDRESS = "localhost:28028"
_LEAST_S = 2.0
"""RAS counts in whole seconds, and waits as long for a process that does not answer."""
_FIRST_WORD_S = 0.3
_ATTEMPTS = 4
"""All ranks of a node listen on one port: the kernel may choose one that is stopped."""
_MOST_BYTES = 16 << 20


async def nccl_status(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The state of NCCL's communicators; None where nobody answers, or only another job does."""
    del clock
    environ = scene.environs.get(0, {})
    is_first = any(rank.rank == 0 for rank in scene.ranks)
    if not is_first or scene.within_s < _LEAST_S or environ.get("NCCL_RAS_ENABLE") == "0":
        return None
    try:
        answer = await _answer(environ.get("NCCL_RAS_ADDR") or _ADDRESS, scene.each_within_s)
    except (OSError, EOFError, ValueError):
        return None
    try:
        report = await asyncio.to_thread(nccl_ras.parse, answer)
    except ValueError as error:
        raise NothingFoundError(f"NCCL's RAS: {error}") from error
    groups = [group for group in report.communicators if not group.usual]
    pids = {rank.pid for group in groups for rank in group.ranks}
    if pids and pids.isdisjoint(rank.pid for rank in scene.ranks):
        return None
    return EvidenceFound(short(nccl_ras.summary(report)), answer)


async def _answer(address: str, within_s: float) -> bytes:
    """Ask for JSON, which older releases refuse; then in words."""
    for command in ("SET FORMAT json", ""):
        for _ in range(_ATTEMPTS):
            try:
                async with asyncio.timeout(_FIRST_WORD_S):
                    reader, writer = await _opened(address)
            except TimeoutError:
                continue
            try:
                if command and not await _is_taken(reader, writer, command):
                    break
                await _is_taken(reader, writer, f"TIMEOUT {max(int(within_s / 2), 1)}")
                writer.write(b"VERBOSE STATUS\n")
                return await _whole(reader)
            finally:
                writer.close()
        else:
            raise NothingFoundError(f"NCCL's RAS at {address} does not answer")
    raise NothingFoundError(f"NCCL's RAS at {address} tells nothing")


async def _opened(address: str) -> tuple[StreamReader, StreamWriter]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(b"CLIENT PROTOCOL 2\n")
        is_ras = (await reader.readline()).startswith(b"SERVER PROTOCOL ")
    except BaseException:
        writer.close()
        raise
    if not is_ras:
        writer.close()
        raise ValueError(f"what listens at {address} is not NCCL's RAS")
    return reader, writer


async def _is_taken(reader: StreamReader, writer: StreamWriter, command: str) -> bool:
    writer.write(f"{command}\n".encode())
    return await reader.readline() == b"OK\n"


async def _whole(reader: StreamReader) -> bytes:
    parts, size = [], 0
    while part := await reader.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise NothingFoundError(f"NCCL's RAS told more than {_MOST_BYTES >> 20} MiB")
    return b"".join(parts)
