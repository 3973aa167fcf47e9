"""Thousands of agents without ranks, a real bus, and rendezvous as a process of its own."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import nan
from pathlib import Path

import psutil
from nats.aio.msg import Msg

from benchmarks.rig import _free_port
from everstep.bus import BusSettings, connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusError, NobodyAnswersError
from everstep.bus.server.dev_server import DevServer, dev_server
from everstep.messages import (
    JobSpec,
    Join,
    Joined,
    Report,
    Reported,
    RoundDocument,
    ShowRound,
    StartRanks,
)
from everstep.messages.codec import decode
from everstep.settings import load

CONNECTIONS = 8
IN_FLIGHT = 512
"""Questions that one connection waits for at once. Real agents all ask at once; here one process
would make all questions before it reads the first answer."""
RANKS = 8


@dataclass(frozen=True)
class Formed:
    """One round."""

    nodes: int
    joined_s: float
    formed_s: float
    """Until the last agent had its order."""
    running_s: float
    messages: int
    size: int
    """Of the messages, in bytes."""
    service_s: float
    """Of the service's processor, until the last agent had its order."""
    agents_s: float
    """The same, of the process with all agents."""
    peak_mib: float
    """Of the service."""


async def form(nodes: int) -> Formed:
    """The first round of a job with this number of nodes, with everything new."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with dev_server(folder) as nats:
            async with connect(nats.settings("admin"), "setup") as bus:
                await topology.init(bus.jetstream)
            async with _rendezvous(nats, folder) as service:
                return await _form(nats.settings("admin"), f"bench-{nodes}", nodes, service)


async def form_on(file: Path, job: str, nodes: int) -> Formed:
    """The same on a bus whose services run, with the login of a new job in a settings file."""
    settings = load({"bus": BusSettings}, files=[file], environ={}).section(BusSettings)
    return await _form(settings, job, nodes, None)


async def _form(
    settings: BusSettings, job: str, count: int, service: psutil.Process | None
) -> Formed:
    async with AsyncExitStack() as stack:
        buses = [
            await stack.enter_async_context(connect(settings, f"agents-{number}"))
            for number in range(CONNECTIONS)
        ]
        crowd, ready = Crowd(buses, job, count), asyncio.Event()
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        hearing = tasks.create_task(crowd.hear(ready))
        await ready.wait()
        if service is not None:
            await _until_answering(buses[0])
        before, used_s = _traffic(buses), (_used_s(service), time.process_time())
        began = time.perf_counter()
        await crowd.join_all()
        joined_s = time.perf_counter() - began
        await asyncio.wait_for(crowd.formed.wait(), 60)
        formed_s = time.perf_counter() - began
        service_s, agents_s = _used_s(service) - used_s[0], time.process_time() - used_s[1]
        after = _traffic(buses)
        await crowd.start_all()
        await asyncio.wait_for(crowd.running.wait(), 60)
        running_s = time.perf_counter() - began
        peak = nan if service is None else service.memory_info().rss / 2**20
        hearing.cancel()
    return Formed(
        nodes=count,
        joined_s=joined_s,
        formed_s=formed_s,
        running_s=running_s,
        messages=after[0] - before[0],
        size=after[1] - before[1],
        service_s=service_s,
        agents_s=agents_s,
        peak_mib=peak,
    )


class Crowd:
    """All agents of one job."""

    def __init__(self, buses: list[NatsBus], job: str, count: int) -> None:
        self.buses = buses
        self.job = job
        self.count = count
        self.asked = 0
        self.ordered: dict[str, StartRanks] = {}
        self.formed = asyncio.Event()
        self.running = asyncio.Event()
        self._limits = [asyncio.Semaphore(IN_FLIGHT) for _ in buses]
        self._spec = JobSpec(
            name="bench",
            labels={},
            command=("train.py",),
            config_fingerprint="f",
            nodes_min=count,
            nodes_max=count,
            ranks_per_node=RANKS,
        )

    async def join_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.count):
                tasks.create_task(self._join(number))

    async def start_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.count):
                tasks.create_task(self._start(number))

    async def hear(self, ready: asyncio.Event) -> None:
        """Orders, wherever they are sent to: the last token names the agent or its node."""
        subject = f"es.order.{self.job}.*"
        bus = self.buses[0]
        async with bus._connection.subscribed(subject, self._on_order, self._ordered):
            ready.set()
            await asyncio.Event().wait()

    async def _on_order(self, message: Msg) -> None:
        self._ordered(message.subject, "", message.data)

    def _ordered(self, _subject: str, _reply: str, data: bytes) -> None:
        """Take an order at once, as an agent's inbox does."""
        order = decode(data)
        if isinstance(order, StartRanks):
            self.ordered[f"n{order.slot}"] = order
            if len(self.ordered) == self.count:
                self.formed.set()

    async def _join(self, number: int) -> None:
        node = f"n{number}"
        question = Join(
            job=self.job,
            node=node,
            instance=f"{number:032x}",
            spec=self._spec,
            allocation="a",
            address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            ranks=RANKS,
            infra_rank=number,
            failure_domain=f"rack-{number // 32}",
            topology=(f"block-{number // 512}", f"rack-{number // 32}"),
            warm=True,
        )
        await self._ask(number, "join", question, Joined)

    async def _start(self, number: int) -> None:
        node = f"n{number}"
        order = self.ordered[node]
        question = Report(
            job=self.job,
            node=node,
            instance=f"{number:032x}",
            slot=order.slot,
            round=order.round,
            event="started",
            reason="all ranks run",
            warm_ranks=RANKS,
        )
        reply = await self._ask(number, "report", question, Reported)
        if isinstance(reply, Reported) and reply.phase == "running":
            self.running.set()

    async def _ask(
        self, number: int, verb: str, question: Join | Report, of: type[Joined | Reported]
    ) -> Joined | Reported:
        bus, limit = self.buses[number % CONNECTIONS], self._limits[number % CONNECTIONS]
        async with limit:
            while True:
                self.asked += 1
                try:
                    return await bus.ask(
                        "rendezvous", verb, question, of, job=self.job, within_s=30
                    )
                except BusError:
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def _rendezvous(nats: DevServer, folder: Path) -> AsyncIterator[psutil.Process]:
    """The service, as a process of its own."""
    settings = nats.settings("service")
    environment = {
        "EVERSTEP_BUS__URL": settings.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(settings.credentials_file),
        "EVERSTEP_BUS__SPOOL_DIR": str(folder / "spool"),
        "EVERSTEP_OBSERVE__PORT": str(_free_port()),
        "EVERSTEP_LOG__LEVEL": "warning",
    }
    service = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "everstep_services.rendezvous"], env={**os.environ, **environment}
    )
    try:
        yield psutil.Process(service.pid)
    finally:
        service.terminate()
        await service.wait()


async def _until_answering(bus: NatsBus) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await bus.ask(
                    "rendezvous", "show", ShowRound(job="none"), RoundDocument, job="none",
                    within_s=2,
                )  # fmt: skip
            except NobodyAnswersError:
                await asyncio.sleep(0.05)
            except BusError:
                return


def _used_s(process: psutil.Process | None) -> float:
    if process is None:
        return nan
    used = process.cpu_times()
    return float(used.user + used.system)


def _traffic(buses: list[NatsBus]) -> tuple[int, int]:
    """Messages and bytes that the agents' connections have sent and received so far."""
    found = [bus._connection.client.stats for bus in buses]
    return (
        sum(one["in_msgs"] + one["out_msgs"] for one in found),
        sum(one["in_bytes"] + one["out_bytes"] for one in found),
    )
