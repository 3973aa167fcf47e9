"""Accounts and logins: what an account for each job costs, compared with one account and passwords.

    python -m benchmarks.logins [--jobs 1000] [--agents 1000]

Both servers are nats-server as this repository configures it; the second has the configuration
of the time before accounts. They take turns. Publisher, server and answering service share the
machine.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from everstep import subjects
from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.job_access import admit
from everstep.bus.auth.login import Login
from everstep.bus.auth.roles import agents_name
from everstep.bus.nats_patches import PatchedClient
from everstep.bus.server.dev_server import DevServer, dev_server
from tests.integration.bus.one_account import one_account
from tests.integration.bus.servers import server_with, store_in

ROUNDS = 5
QUESTIONS = 2_000
BEATS = 20_000
FACTS = 5_000
JOB = "j"


class Place:
    """A server: how its services and its agents log in."""

    def __init__(self, name: str, control: BusSettings, agents: BusSettings) -> None:
        self.name = name
        self.control = control
        self.agents = agents
        self.first_fact_ms: list[float] = []
        self.question_us: list[float] = []
        self.beats: list[float] = []
        self.facts: list[float] = []

    async def client(self, settings: BusSettings) -> Client:
        options = Login(settings).options()
        prefix = "_INBOX" if settings.user is None else f"_INBOX.{settings.user}"
        return await nats.connect(**options, inbox_prefix=prefix)

    async def round(self) -> None:
        began = time.perf_counter()
        agent = await self.client(self.agents)
        await agent.request(subjects.fact(JOB, "progress_made"), b"{}", timeout=10)
        self.first_fact_ms.append(1e3 * (time.perf_counter() - began))
        services = await self.client(self.control)
        try:
            await self._ask(agent, services)
            await self._beat(agent, services)
            await self._record(agent)
        finally:
            await agent.close()
            await services.close()

    async def _ask(self, agent: Client, services: Client) -> None:
        async def answer(message: Msg) -> None:
            await message.respond(b"{}")

        subject = subjects.ask("rendezvous", "join", JOB)
        hearing = await services.subscribe(subjects.ask("rendezvous", "join", None), cb=answer)
        await services.flush()
        took = []
        for _ in range(QUESTIONS):
            began = time.perf_counter()
            await agent.request(subject, b"{}", timeout=10)
            took.append(1e6 * (time.perf_counter() - began))
        self.question_us.append(statistics.median(took))
        await hearing.unsubscribe()

    async def _beat(self, agent: Client, services: Client) -> None:
        heard, done = 0, asyncio.Event()

        async def hear(_: Msg) -> None:
            nonlocal heard
            heard += 1
            if heard == BEATS:
                done.set()

        hearing = await services.subscribe(subjects.beat(), cb=hear, pending_msgs_limit=0)
        await services.flush()
        body, began = b"x" * 600, time.perf_counter()
        for _ in range(BEATS):
            await agent.publish(subjects.beat(JOB, "n"), body)
        await asyncio.wait_for(done.wait(), 60)
        self.beats.append(BEATS / (time.perf_counter() - began))
        await hearing.unsubscribe()

    async def _record(self, agent: Client) -> None:
        acknowledged, done = 0, asyncio.Event()
        inbox = agent.new_inbox()

        async def hear(_: Msg) -> None:
            nonlocal acknowledged
            acknowledged += 1
            if acknowledged == FACTS:
                done.set()

        await agent.subscribe(inbox, cb=hear, pending_msgs_limit=0)
        body, began = b"x" * 400, time.perf_counter()
        for _ in range(FACTS):
            await agent.publish(subjects.fact(JOB, "progress_made"), body, reply=inbox)
        await asyncio.wait_for(done.wait(), 60)
        self.facts.append(FACTS / (time.perf_counter() - began))

    def line(self) -> str:
        parts = [
            f"{self.name:14}",
            f"login to first fact {_of(self.first_fact_ms, 'ms', 1)}",
            f"question {_of(self.question_us, 'us')}",
            f"beats/s {_of(self.beats)}",
            f"facts/s {_of(self.facts)}",
        ]
        return "  ".join(parts)


def _of(values: list[float], unit: str = "", digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]{unit and ' ' + unit}"


@asynccontextmanager
async def one_account_place(folder: Path) -> AsyncIterator[Place]:
    config, _ = one_account(folder, JOB)
    async with server_with(folder, {**config, "jetstream": store_in(folder)}) as port:

        def login(user: str) -> BusSettings:
            file = folder / f"{user}.password"
            return BusSettings(url=f"nats://127.0.0.1:{port}", user=user, password_file=file)

        async with connect(login("admin"), "setup") as bus:
            await topology.init(bus.jetstream)
        yield Place("one account", login("service"), login(agents_name(JOB)))


async def side_by_side(folder: Path, server: DevServer) -> None:
    async with connect(server.settings("admin"), "setup") as bus:
        await topology.init(bus.jetstream)
    accounts = Place("accounts", server.settings("service"), await server.grant(JOB))
    async with one_account_place(folder) as one:
        for _ in range(ROUNDS):
            await one.round()
            await accounts.round()
    for place in (one, accounts):
        print(place.line())


async def many_jobs(server: DevServer, jobs: int) -> None:
    """Let jobs in, one after the other, as `everstep bus login` and `everstep run` do."""
    before, took = resident_mib(server.pid), []
    address = BusSettings(url=server.url)
    for number in range(jobs):
        began = time.perf_counter()
        await admit(server.operator, address, f"job-{number}")
        took.append(1e3 * (time.perf_counter() - began))
    print(f"{jobs} jobs let in: {_of(took, 'ms', 1)} each, {sum(took) / 1e3:.1f} s in all")
    print(f"server memory: {before:.0f} MiB before, {resident_mib(server.pid):.0f} MiB after")


async def many_agents(server: DevServer, jobs: int, agents: int) -> None:
    """All at once: connect, log in, and the first fact acknowledged, asked for again after 5 s."""
    names = [f"job-{number % jobs}" for number in range(agents)]
    logins = [server.operator.login(agents_name(name)) for name in names]
    taken: list[float] = []
    again = 0

    async def join(number: int, stack: AsyncExitStack) -> None:
        nonlocal again
        login = logins[number]
        client = PatchedClient()
        await client.connect(
            server.url, user_jwt_cb=login.token.encode, signature_cb=login.answer,
            connect_timeout=60,
        )  # fmt: skip
        stack.push_async_callback(client.close)
        while True:
            try:
                await client.request(
                    subjects.fact(names[number], "progress_made"), b"{}", timeout=5
                )
                break
            except nats.errors.TimeoutError:
                again += 1
        taken.append(time.perf_counter() - began)

    async with AsyncExitStack() as stack:
        began = time.perf_counter()
        await asyncio.gather(*(join(number, stack) for number in range(agents)))
        took, memory = time.perf_counter() - began, resident_mib(server.pid)
        taken.sort()
        print(
            f"{agents} agents of {jobs} jobs joining at once: all in after {took:.2f} s, half "
            f"after {taken[agents // 2]:.2f} s, asked again {again} times; server {memory:.0f} MiB "
            f"with them connected; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        )


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def main(jobs: int, agents: int) -> None:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        (folder / "one").mkdir()
        began = time.perf_counter()
        async with dev_server(folder / "accounts") as server:
            print(f"nats-server ready after {1e3 * (time.perf_counter() - began):.0f} ms")
            await side_by_side(folder / "one", server)
            await many_jobs(server, jobs)
            for of_jobs in (1, 20, jobs):
                await many_agents(server, of_jobs, agents)
        began = time.perf_counter()
        async with dev_server(folder / "accounts"):
            again_ms = 1e3 * (time.perf_counter() - began)
            print(f"nats-server with {jobs} accounts ready again after {again_ms:.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--agents", type=int, default=1000)
    asked = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(asked.jobs, asked.agents))
