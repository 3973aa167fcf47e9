"""Servers, and imitations of servers, for tests that try to get onto the bus."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from operator import not_
from pathlib import Path

import pytest

from everstep.bus import BusSettings, connect
from everstep.bus.errors import BusError
from everstep.bus.server.config import ServerPlan
from everstep.bus.server.dev_server import DevServer, _port_in, find_program
from tests.stopping import stop
from tests.waiting import until_async


async def refused(settings: BusSettings) -> BusError:
    """The error that connecting raises."""
    async with asyncio.timeout(40):
        with pytest.raises(BusError) as caught:
            async with connect(settings, "test"):
                pass
    assert "\n" not in str(caught.value)
    return caught.value


async def granted(nats: DevServer, job: str) -> BusSettings:
    """How the agents of a job log in."""
    return await nats.grant(job)


def store_in(folder: Path) -> dict[str, object]:
    """JetStream's part of a configuration, with room for all streams on any disk.

    Without `max_file_store` the server grants three quarters of the free disk, and the limits of
    all streams together are more than that on a machine with 25 GiB free.
    """
    return {"store_dir": str(folder), "max_file_store": ServerPlan(folder).max_file_bytes}


async def reload(folder: Path, config: dict[str, object]) -> None:
    """Give the server of `server_with` another configuration."""
    await _written(folder, config)
    (ports,) = await asyncio.to_thread(lambda: list(folder.glob("nats-server_*.ports")))
    os.kill(int(ports.stem.partition("_")[2]), signal.SIGHUP)


async def _written(folder: Path, config: dict[str, object]) -> Path:
    path = folder / "nats.json"
    await asyncio.to_thread(path.write_text, json.dumps({"listen": "127.0.0.1:-1", **config}))
    return path


@asynccontextmanager
async def server_with(folder: Path, config: dict[str, object]) -> AsyncIterator[int]:
    """A nats-server with a configuration of the test's own; its port."""
    path = await _written(folder, config)
    process = await asyncio.create_subprocess_exec(
        *[find_program(), "-c", str(path), "--ports_file_dir", str(folder)],
        stderr=asyncio.subprocess.DEVNULL,
    )
    ports = folder / f"nats-server_{process.pid}.ports"
    try:
        yield await until_async(lambda: asyncio.to_thread(_port_in, ports), "it has a port")
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def speaking(first: bytes) -> AsyncIterator[str]:
    """A listener that says `first`, and is not a NATS server of ours."""

    clients: set[asyncio.Task[None] | None] = set()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(asyncio.current_task())
        writer.write(first)
        await reader.read()
        writer.close()
        clients.discard(asyncio.current_task())

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await until_async(lambda: clients, "every client has closed its socket", holds=not_)


@asynccontextmanager
async def relay(
    url: str, refusals: Sequence[bytes | None] = (), before_answer: bytes = b""
) -> AsyncIterator[str]:
    """The server at that address, after it has refused as many clients; None is without a word.

    To each of the others it says `before_answer` before it answers for the first time.
    """
    host, port = url.removeprefix("nats://").split(":")
    clients: set[asyncio.Task[None] | None] = set()
    left = list(refusals)

    async def greet(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        to.write(await source.readline())
        to.write(before_answer + await source.readline())
        await pipe(source, to)

    async def pipe(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            to.write(data)
        to.close()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(asyncio.current_task())
        from_server, to_server = await asyncio.open_connection(host, int(port))
        if left:
            info = await from_server.readline()
            if (refusal := left.pop()) is not None:
                writer.write(info + refusal)
            to_server.close()
            writer.close()
        else:
            answering = greet if before_answer else pipe
            await asyncio.gather(pipe(reader, to_server), answering(from_server, writer))
        clients.discard(asyncio.current_task())

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert not left
    await until_async(lambda: clients, "every client has closed its socket", holds=not_)


async def stopped(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs any more."""
    await asyncio.to_thread(stop, pid)


async def killed_with_its_data(nats: DevServer, store: Path) -> None:
    """Kill a server whose data are gone; it stands first, or it would write what is removed."""
    await stopped(nats.pid)
    await asyncio.to_thread(shutil.rmtree, store)
    os.kill(nats.pid, signal.SIGKILL)
