"""The relay between agent and bus: what it harms, and that all of it is mended."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from everstep_services.agent.injection import agent_faults
from everstep_services.agent.injection.agent_faults import (
    AgentFaults,
    Relay,
    opened_relay,
    servers_of,
    without_others,
)
from tests.waiting import WITHIN_S, turns, until_async
from trainer_sdk.inject.catalog import BadFaultError, fault_request

HELLO = b'INFO {"server_id": "x", "connect_urls": ["10.0.0.2:4222"]}\r\n'
Way = tuple[Relay, str, int]


@pytest_asyncio.fixture
async def way() -> AsyncIterator[Way]:
    """A relay to a server that greets, and says each line back."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with opened_relay([("127.0.0.1", server.sockets[0].getsockname()[1])]) as (relay, url):
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        yield relay, parts.hostname, parts.port
    server.close()


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def says(self, text: bytes) -> bytes:
        self.writer.write(text)
        return await self.reader.readline()


async def joined(way: Way) -> Peer:
    """A connection over which the server has greeted."""
    peer = Peer(*await asyncio.open_connection(way[1], way[2]))
    greeting = await peer.reader.readline()
    if not greeting:
        peer.writer.close()
        raise ConnectionError("closed")
    assert greeting == b'INFO {"server_id": "x"}\r\n'
    return peer


async def test_it_passes_on_and_hides_the_neighbours(way: Way) -> None:
    peer = await joined(way)
    assert await peer.says(b"one\n") == b"one\n"
    peer.writer.close()


async def test_a_cut_closes_refuses_and_is_mended(way: Way) -> None:
    peer = await joined(way)
    way[0].cut()
    with pytest.raises(OSError, match=r"reset|Connection lost|closed"):
        if not await peer.says(b"one\n"):
            raise ConnectionError("closed")
    with pytest.raises(OSError, match=r"reset|closed"):
        await joined(way)
    way[0].join()
    again = await joined(way)
    assert await again.says(b"two\n") == b"two\n"
    again.writer.close()
    peer.writer.close()


async def test_nothing_passes_through_a_partition_until_it_is_over(way: Way) -> None:
    peer = await joined(way)
    way[0].block()
    answer = asyncio.create_task(peer.says(b"one\n"))
    unanswered = asyncio.create_task(joined(way))
    done, _ = await asyncio.wait([answer, unanswered], timeout=0.2)
    assert not done
    way[0].unblock()
    assert await answer == b"one\n"
    (await unanswered).writer.close()
    peer.writer.close()


async def test_what_is_slowed_comes_late_and_whole(way: Way) -> None:
    peer = await joined(way)
    way[0].delay_s = 0.2
    began = asyncio.get_running_loop().time()
    assert await peer.says(b"one\n") == b"one\n"
    assert asyncio.get_running_loop().time() - began >= 0.4
    peer.writer.close()


def test_a_bus_with_tls_has_no_relay() -> None:
    assert servers_of("nats://a:1, nats://b") == [("a", 1), ("b", 4222)]
    assert servers_of("tls://a:1") is None
    assert without_others(b"-ERR\r\n") == b"-ERR\r\n"
    with pytest.raises(BadFaultError, match="cannot be made on a bus with TLS"):
        AgentFaults(None).check(fault_request("partition"))


async def test_a_full_disk_is_empty_again(tmp_path: Path) -> None:
    """The file has no name: what takes the space shows among this process's files."""
    harm = AgentFaults(None)
    wished = fault_request("disk_full", amount=64, target=str(tmp_path), for_s=60)
    await asyncio.to_thread(harm.check, wished)
    task = asyncio.create_task(harm.make(wished))
    await until_async(lambda: largest(tmp_path) >= 64 << 20, "the space is taken")
    assert await asyncio.to_thread(os.listdir, tmp_path) == []
    task.cancel()
    await asyncio.wait([task])
    assert largest(tmp_path) == 0
    missing = fault_request("disk_full", target=str(tmp_path / "none"))
    with pytest.raises(BadFaultError, match="is not a folder that can be written to"):
        await asyncio.to_thread(harm.check, missing)


async def test_a_full_disk_that_is_taken_back_while_it_fills_is_empty_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, filled = threading.Event(), agent_faults._filled

    def slowly(folder: Path, most: int) -> IO[bytes]:
        file = filled(folder, most)
        assert may_end.wait(WITHIN_S)
        return file

    monkeypatch.setattr(agent_faults, "_filled", slowly)
    wished = fault_request("disk_full", amount=1, target=str(tmp_path), for_s=60)
    task = asyncio.create_task(AgentFaults(None).make(wished))
    await until_async(lambda: largest(tmp_path), "the space is taken")
    task.cancel()
    await turns()
    may_end.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert largest(tmp_path) == 0


def largest(folder: Path) -> int:
    """Of the files of this process below a folder, in bytes that are really taken."""
    found = [0]
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(link.readlink()).startswith(str(folder)):
                found.append(link.stat().st_blocks * 512)
        except OSError:
            continue
    return max(found)


async def test_a_clock_is_wrong_for_a_while_and_what_it_measures_never_is() -> None:
    harm = AgentFaults(None)
    task = asyncio.create_task(harm.make(fault_request("clock_skew", amount=3600, for_s=60)))
    true = harm.clock.wall()
    await until_async(lambda: (harm.clock.wall() - true).total_seconds() > 3500, "it is ahead")
    assert harm.clock.now() <= asyncio.get_running_loop().time() + 1
    task.cancel()
    await asyncio.wait([task])
    assert (harm.clock.wall() - true).total_seconds() < 3500
