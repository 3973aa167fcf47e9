"""A rank's ear for faults: it is asked first whether it can have one, and told then to go on."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import ShortPath
from trainer_sdk.inject.catalogue import BadFaultError, FaultRequest

_WITHIN_S = 20.0


class Door:
    """Use `Door.opened`."""

    def __init__(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._rank = rank
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def opened(cls, folder: Path, rank: int) -> AsyncIterator["Door"]:
        """The way to a rank. `BadFaultError` where nobody listens."""
        try:
            with ShortPath(str(folder / layout.INJECTION_SOCKET)) as path:
                reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise BadFaultError(
                f"rank {rank} does not listen for faults: it is no Python script, or not there "
                f"yet, or gone"
            ) from error
        try:
            yield cls(rank, reader, writer)
        finally:
            writer.close()

    async def knock(self, wish: FaultRequest) -> None:
        """`BadFaultError` when it cannot have this fault."""
        asked = {
            "fault": wish.fault.name,
            "for_s": wish.for_s,
            "amount": wish.amount if wish.fault.amount else None,
            "target": wish.target,
        }
        self._writer.write(json.dumps(asked).encode())
        try:
            async with asyncio.timeout(_WITHIN_S):
                answer = json.loads(await self._reader.read(1 << 16))
        except (TimeoutError, OSError, ValueError) as error:
            raise BadFaultError(
                f"rank {self._rank} does not answer within {_WITHIN_S:g} s: it is stopped, or "
                f"another fault keeps it"
            ) from error
        if answer["refused"]:
            raise BadFaultError(f"rank {self._rank}: {answer['refused']}")

    async def go(self) -> None:
        """It may begin."""
        self._writer.write(b"go")
        await self._writer.drain()
