"""Faults of the agent itself: its connection to the bus, its wall clock, a disk, its life."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, get_args
from urllib.parse import urlsplit

import msgspec

from everstep.bus import BusSettings
from everstep.clock import SystemClock
from trainer_sdk.inject.catalog import BadFaultError, FaultRequest, LinkFault

_BLOCK_BYTES = 1 << 16
_DEFAULT_PORT = 4222
_LOOPBACK = "127.0.0.1"
_HELLO = b"INFO "


class Relay:
    """Passes bytes on, both ways, until it is asked to stop. Use `opened_relay`."""

    def __init__(self, servers: list[tuple[str, int]]) -> None:
        self._servers = servers
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self._passes = asyncio.Event()
        self._passes.set()
        self.delay_s = 0.0
        """The delay of each piece."""

    def cut(self) -> None:
        """Close every connection, and refuse new ones."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def block(self) -> None:
        """Let nothing pass, and keep the connections."""
        self._passes.clear()

    def join(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def unblock(self) -> None:
        """Let everything pass again, waiting bytes first."""
        self._passes.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the agent."""
        self._writers.add(writer)
        try:
            if not self._is_cut:
                await self._join(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passes.wait()
        answers, asks = await self._connected()
        self._writers.add(asks)
        try:
            with contextlib.suppress(OSError):
                hello = await answers.readline()
                writer.write(without_others(hello))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pass_on(reader, asks))
                    tasks.create_task(self._pass_on(answers, writer))
        finally:
            self._writers.discard(asks)
            asks.transport.abort()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        trouble: OSError | None = None
        for host, port in self._servers:
            try:
                return await asyncio.open_connection(host, port)
            except OSError as error:
                trouble = error
        raise ConnectionError("no server of the bus can be reached") from trouble

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_BLOCK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._passes.wait()
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()


def servers_of(url: str) -> list[tuple[str, int]] | None:
    """The addresses of the servers; None if one of them requires TLS, which detects a relay."""
    parts = [urlsplit(part.strip()) for part in url.split(",") if part.strip()]
    if any(part.scheme != "nats" for part in parts):
        return None
    return [(part.hostname or _LOOPBACK, part.port or _DEFAULT_PORT) for part in parts]


def without_others(hello: bytes) -> bytes:
    """The server's first line, without its neighbours, which would be ways around the relay."""
    if not hello.startswith(_HELLO):
        return hello
    info = json.loads(hello[len(_HELLO) :])
    info.pop("connect_urls", None)
    return _HELLO + json.dumps(info).encode() + b"\r\n"


@asynccontextmanager
async def opened_relay(servers: list[tuple[str, int]]) -> AsyncIterator[tuple[Relay, str]]:
    """A relay to these servers, and the URL under which the agent reaches it."""
    relay = Relay(servers)
    running: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as tasks:

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = tasks.create_task(_served(relay, reader, writer))
            running.add(task)
            task.add_done_callback(running.discard)

        server = await asyncio.start_server(accept, _LOOPBACK, 0)
        try:
            yield relay, f"nats://{_LOOPBACK}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in running:
                task.cancel()


async def _served(relay: Relay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await relay.serve(reader, writer)


_MB = 1 << 20
_ON_THE_LINK = frozenset(get_args(LinkFault))


class SkewedClock(SystemClock):
    """A clock whose wall time can be wrong, and whose intervals never are."""

    ahead_s = 0.0

    def wall(self) -> datetime:
        return super().wall() + timedelta(seconds=self.ahead_s)


class AgentFaults:
    """Faults of one agent, each undone at its end. Use `opened_agent_faults`."""

    def __init__(self, relay: Relay | None) -> None:
        self.clock = SkewedClock()
        self._relay = relay

    def check(self, wish: FaultRequest) -> None:
        """Raise `BadFaultError` if the fault cannot be made here."""
        if wish.fault.name in _ON_THE_LINK and self._relay is None:
            raise BadFaultError(
                f"{wish.fault.name} cannot be made on a bus with TLS: it would see the relay"
            )
        if wish.fault.name == "disk_full" and not os.access(wish.target, os.W_OK | os.X_OK):
            raise BadFaultError(f"disk_full: {wish.target} is not a folder that can be written to")

    async def make(self, wish: FaultRequest) -> None:
        """Make the fault, and undo it when its time is over or this is cancelled."""
        for_s = wish.for_s or 0.0
        match wish.fault.name:
            case "kill_agent":
                os.kill(os.getpid(), signal.SIGKILL)
            case "clock_skew":
                self.clock.ahead_s = wish.amount
                try:
                    await asyncio.sleep(for_s)
                finally:
                    self.clock.ahead_s = 0.0
            case "disk_full":
                size = wish.amount * _MB
                with await _fill(Path(wish.target), size):
                    await asyncio.sleep(for_s)
            case "cut_off" | "partition" | "slow_link" as name:
                assert self._relay is not None, "it was checked"
                _harm_link(self._relay, name, wish.amount)
                try:
                    await asyncio.sleep(for_s)
                finally:
                    _mend_link(self._relay, name)
            case _:
                raise AssertionError(f"{wish.fault.name} is made in a rank, not in an agent")


def _harm_link(relay: Relay, name: LinkFault, amount: int) -> None:
    match name:
        case "cut_off":
            relay.cut()
        case "partition":
            relay.block()
        case "slow_link":
            relay.delay_s = amount / 1000


def _mend_link(relay: Relay, name: LinkFault) -> None:
    match name:
        case "cut_off":
            relay.join()
        case "partition":
            relay.unblock()
        case "slow_link":
            relay.delay_s = 0.0


async def _fill(folder: Path, most: int) -> IO[bytes]:
    """Take the space in a thread; if this is cancelled meanwhile, the space is free at its end."""
    filling = asyncio.get_running_loop().run_in_executor(None, _filled, folder, most)
    try:
        return await asyncio.shield(filling)
    except asyncio.CancelledError:  # which does not end the thread
        with contextlib.suppress(OSError):
            (await filling).close()
        raise


def _filled(folder: Path, most: int) -> IO[bytes]:
    """A file without a name, so that its space is free again even if this process is killed."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
        left = min(most, shutil.disk_usage(folder).free)
        taken = 0
        while left >= _MB:
            try:
                os.posix_fallocate(file.fileno(), taken, left)
                taken += left
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                left //= 2  # file systems keep some space for themselves
            else:
                left = min(most - taken, shutil.disk_usage(folder).free)
        stack.pop_all()
        return file


@asynccontextmanager
async def opened_agent_faults(
    settings: BusSettings,
) -> AsyncIterator[tuple[AgentFaults, BusSettings]]:
    """The faults of this agent, and settings of the bus that lead through the relay."""
    servers = None if settings.ca_file else servers_of(settings.url)
    if servers is None:
        yield AgentFaults(None), settings
        return
    async with opened_relay(servers) as (relay, url):
        yield AgentFaults(relay), msgspec.structs.replace(settings, url=url)
