"""What the benchmarks share: a server, history as a process of its own, and its REST."""

import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

from everstep.bus import BusSettings, connect, topology
from everstep.bus.server.dev_server import DevServer, dev_server


@dataclass
class Rig:
    """Everything that runs."""

    nats: DevServer
    bus: BusSettings
    history: psutil.Process
    rest: httpx2.AsyncClient

    def memory_mib(self) -> dict[str, float]:
        processes = {
            "nats-server": psutil.Process(self.nats.pid),
            "history": self.history,
            "publisher": psutil.Process(),
        }
        return {name: one.memory_info().rss / 2**20 for name, one in processes.items()}

    async def visible(self) -> int:
        """How many facts REST shows."""
        answer = await self.rest.get("/api/v1/status")
        answer.raise_for_status()
        return int(answer.json()["projected_n"])


@asynccontextmanager
async def rig(folder: Path, database_url: str, sync: str = "2m") -> AsyncIterator[Rig]:
    """nats-server, history with REST on a database, and a client with a token."""
    async with dev_server(folder, sync=sync) as nats:
        async with connect(nats.settings("admin"), "setup") as bus:
            await topology.init(bus.jetstream)
        settings = nats.settings("service")
        token_file, port = folder / "token", _free_port()
        environment = {
            "EVERSTEP_BUS__URL": settings.url,
            "EVERSTEP_BUS__CREDENTIALS_FILE": str(settings.credentials_file),
            "EVERSTEP_HISTORY__DATABASE_URL": database_url,
            "EVERSTEP_API__PORT": str(port),
            "EVERSTEP_API__FIRST_TOKEN_FILE": str(token_file),
            "EVERSTEP_OBSERVE__PORT": str(_free_port()),
            "EVERSTEP_LOG__LEVEL": "warning",
        }
        history = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "everstep_services.history", "serve"],
            env={**os.environ, **environment},
        )
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as rest:
                await _until_projecting(rest, token_file)
                yield Rig(nats, settings, psutil.Process(history.pid), rest)
        finally:
            history.terminate()
            await history.wait()


async def _until_projecting(rest: httpx2.AsyncClient, token_file: Path) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if token_file.exists():
                    rest.headers["Authorization"] = f"Bearer {token_file.read_text().strip()}"
                    if (await rest.get("/api/v1/status")).json().get("is_projecting"):
                        return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.05)


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def row(name: str, values: Sequence[float], unit: str = "") -> str:
    """min, median and max of some measurements, and how many there were."""
    middle = statistics.median(values)
    return f"{name:44}{min(values):12,.1f}{middle:12,.1f}{max(values):12,.1f}{len(values):6} {unit}"


HEAD = f"{'':44}{'min':>12}{'median':>12}{'max':>12}{'n':>6}"
