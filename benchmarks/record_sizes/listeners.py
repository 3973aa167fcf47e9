"""Clients of the live stream that come, listen for a moment, and go."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

_STAY_S = (0.3, 3.0)


@dataclass
class Visits:
    """What the clients met."""

    opened: int = 0
    refused: int = 0
    read_bytes: int = 0


async def come_and_go(
    address: tuple[str, int], tokens: Sequence[str], clients: int, seconds: float
) -> Visits:
    """This number at a time, each again and again; half of them leave without a word."""
    visits, end = Visits(), asyncio.get_running_loop().time() + seconds
    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            token = tokens[number % len(tokens)]
            tasks.create_task(_client(address, token, number, end, visits))
    return visits


async def _client(
    address: tuple[str, int], token: str, number: int, end: float, visits: Visits
) -> None:
    chance, loop = random.Random(number), asyncio.get_running_loop()
    await asyncio.sleep(chance.uniform(0, 2))
    while loop.time() < end:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(
            f"GET /api/v1/facts/stream HTTP/1.1\r\nHost: {address[0]}\r\n"
            f"Authorization: Bearer {token}\r\n\r\n".encode()
        )
        head = await reader.readuntil(b"\r\n")
        if b" 200 " in head:
            visits.opened += 1
            visits.read_bytes += await _listen(reader, chance.uniform(*_STAY_S))
        else:
            visits.refused += 1
            await asyncio.sleep(0.1)
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()


async def _listen(reader: asyncio.StreamReader, seconds: float) -> int:
    read = 0
    try:
        async with asyncio.timeout(seconds):
            while data := await reader.read(65536):
                read += len(data)
    except TimeoutError:
        pass
    return read
