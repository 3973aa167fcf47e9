"""The fleet before the real service: real NATS, health as a process of its own, real facts."""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
import psutil

from benchmarks.fleets.jobs import Crowd
from benchmarks.fleets.sender import Sent
from benchmarks.fleets.virtual import PAUSE_S, PAUSED_EVERY_S
from benchmarks.rig import _free_port
from everstep import subjects
from everstep.bus import BusSettings, connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer, dev_server
from everstep.messages import NodeLost
from everstep_services.health.settings import HealthSettings

_LEAD_S = 1.0
"""Senders log in before the first beat."""
_AFTER_S = 10.0


@dataclass
class Usage:
    """What one process used while all beats came."""

    processor_ratio: float = 0.0
    """Of one core."""
    peak_mib: float = 0.0


@dataclass
class Seen:
    """What came of it."""

    sent: list[Sent] = field(default_factory=list)
    lost: dict[str, tuple[float, str]] = field(default_factory=dict)
    """When the finding was on the bus, and why, by node."""
    usage: dict[str, Usage] = field(default_factory=dict)
    heard: float = 0.0
    dropped: float = 0.0
    blind_s: float = 0.0
    pauses: int = 0


async def observed(crowd: Crowd, settings: HealthSettings, senders: int, pauses: bool) -> Seen:
    """Let the crowd live before one health service."""
    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="everstep-fleet-") as name:
        folder = Path(name)
        async with dev_server(folder) as nats:
            bus_settings = nats.settings("admin")
            async with connect(bus_settings, "setup") as bus:
                await topology.init(bus.jetstream)
                port = _free_port()
                async with _health(nats, folder, settings, port) as health:
                    await _watch(crowd, bus, bus_settings, health, nats.pid, senders, pauses, seen)
                    await _read_metrics(port, seen)
    return seen


async def _watch(
    crowd: Crowd,
    bus: NatsBus,
    bus_settings: BusSettings,
    health: psutil.Process,
    nats_pid: int,
    senders: int,
    pauses: bool,
    seen: Seen,
) -> None:
    made = [await _sender(crowd, bus_settings, number, senders) for number in range(senders)]
    for sender in made:
        assert sender.stdout is not None
        await sender.stdout.readline()  # its beats are made
    began = time.monotonic() + _LEAD_S
    processes = {"nats-server": psutil.Process(nats_pid), "health": health}
    async with asyncio.TaskGroup() as tasks:
        hearing = tasks.create_task(_hear(bus, seen))
        sending = [tasks.create_task(_sent(sender, began)) for sender in made]
        await asyncio.sleep(began - time.monotonic())
        pausing = tasks.create_task(_pause(health, crowd, seen)) if pauses else None
        await _measure(processes, began + crowd.seconds, seen)
        if pausing is not None:
            await pausing
        seen.sent = [await one for one in sending]
        await asyncio.sleep(_AFTER_S)
        hearing.cancel()


async def _hear(bus: NatsBus, seen: Seen) -> None:
    async with bus.subscribe(subjects.fact(None, "node_lost"), NodeLost) as losses:
        async for fact in losses:
            seen.lost[fact.node] = (time.monotonic(), fact.reason)


async def _sender(crowd: Crowd, bus: BusSettings, number: int, of: int) -> Process:
    words = [msgspec.json.encode(one, enc_hook=str).decode() for one in (crowd, bus)]
    return await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "benchmarks.fleets.sender", *words, str(number), str(of)],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


async def _sent(sender: Process, began: float) -> Sent:
    said, _ = await sender.communicate(f"{began}\n".encode())
    return msgspec.json.decode(said, type=Sent)


async def _pause(health: psutil.Process, crowd: Crowd, seen: Seen) -> None:
    """Stop health as it stands, now and then."""
    rng, end = random.Random(crowd.seed + 3), time.monotonic() + crowd.seconds
    while (wait_s := rng.uniform(PAUSE_S, 2 * PAUSED_EVERY_S)) < end - time.monotonic():
        await asyncio.sleep(wait_s)
        health.send_signal(signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        health.send_signal(signal.SIGCONT)
        seen.pauses += 1


async def _measure(processes: dict[str, psutil.Process], end: float, seen: Seen) -> None:
    before, began = {name: _spent_s(one) for name, one in processes.items()}, time.monotonic()
    seen.usage = {name: Usage() for name in processes}
    while time.monotonic() < end:
        for name, one in processes.items():
            usage = seen.usage[name]
            usage.peak_mib = max(usage.peak_mib, one.memory_info().rss / 2**20)
        await asyncio.sleep(min(1.0, max(0.0, end - time.monotonic())))
    took_s = time.monotonic() - began
    for name, one in processes.items():
        seen.usage[name].processor_ratio = (_spent_s(one) - before[name]) / took_s


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _read_metrics(port: int, seen: Seen) -> None:
    async with httpx2.AsyncClient() as client:
        lines = (await client.get(f"http://127.0.0.1:{port}/metrics")).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    seen.heard, seen.dropped, seen.blind_s = (
        sum(float(value) for key, value in values.items() if key.split("{")[0] == name)
        for name in _METRICS
    )


_METRICS = (
    "everstep_health_beats_total",
    "everstep_bus_heard_dropped_total",
    "everstep_health_blind_seconds_total",
)


@asynccontextmanager
async def _health(
    nats: DevServer, folder: Path, settings: HealthSettings, port: int
) -> AsyncIterator[psutil.Process]:
    bus = nats.settings("service")
    environment = {
        "EVERSTEP_BUS__URL": bus.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(bus.credentials_file),
        "EVERSTEP_BUS__SPOOL_DIR": str(folder / "spool"),
        "EVERSTEP_HEALTH__SILENCE_LIMIT_S": str(settings.silence_limit_s),
        "EVERSTEP_HEALTH__TICK_S": str(settings.tick_s),
        "EVERSTEP_OBSERVE__PORT": str(port),
        "EVERSTEP_LOG__LEVEL": "error",
    }
    process = await asyncio.create_subprocess_exec(*_program(), env={**os.environ, **environment})
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        await process.wait()


def _program() -> Sequence[str]:
    return [sys.executable, "-m", "everstep_services.health"]
