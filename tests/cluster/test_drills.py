"""Servers are killed, stopped and cut off under work: nothing acknowledged is lost or doubled."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from everstep.bus import connect
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusError
from everstep.messages import BlobRef, JobEnded
from everstep.messages.codec import decode
from tests.cluster.servers import NAMES, Cluster
from tests.integration.bus.facts import ended
from tests.waiting import until_async

EVERY_S = 0.02
Break = Callable[[Cluster], None]


class Work:
    """Records facts, writes a document and stores evidence, and remembers what was acknowledged."""

    def __init__(self, bus: NatsBus, job: str) -> None:
        self._bus = bus
        self._job = job
        self._is_over = False
        self.facts = 0
        self.writes = 0
        self.evidence: list[tuple[BlobRef, bytes]] = []

    async def at_a_rate(self, once: Callable[[], Awaitable[None]]) -> None:
        while not self._is_over:
            await once()
            await asyncio.sleep(EVERY_S)

    async def record(self) -> None:
        await self._bus.record(msgspec.structs.replace(ended(self.facts), job=self._job))
        self.facts += 1

    async def write(self) -> None:
        documents = self._bus.documents("CONTROL")
        with suppress(BusError):  # there is no leader: it goes on when there is one
            revision = await documents.put(self._job, b"x", revision=None)
            assert (await documents.get(self._job)).revision >= revision, "it went back"
            self.writes += 1

    async def store(self) -> None:
        content = uuid.uuid4().bytes * 64
        with suppress(BusError):  # as above
            self.evidence.append((await self._bus.blobs.put(self._job, content), content))

    async def goes_on(self) -> None:
        """Return once the document was written, and evidence stored."""
        writes, stored = self.writes, len(self.evidence)
        await until_async(
            lambda: self.writes > writes and len(self.evidence) > stored, "work goes on"
        )

    def end(self) -> None:
        self._is_over = True

    async def prove_complete(self) -> None:
        await self._bus.flush(60)
        for ref, content in self.evidence:
            assert await self._bus.blobs.get(ref) == content
        numbers: Counter[int] = Counter()
        async with self._bus.facts(None) as reader:
            while len(numbers) < self.facts:
                for fact in (await reader.fetch(1000, 1)).facts:
                    message = decode(fact.data)
                    if isinstance(message, JobEnded) and message.job == self._job:
                        numbers[message.exit_code or 0] += 1
        assert numbers == Counter(range(self.facts))


@asynccontextmanager
async def at_work(cluster: Cluster, job: str, spool: Path) -> AsyncIterator[Work]:
    settings = cluster.settings("service", reconnect_jitter_s=0.1)
    async with connect(settings, job, spool=spool / "spool") as bus:
        work = Work(bus, job)
        async with asyncio.TaskGroup() as tasks:
            for once in (work.record, work.write, work.store):
                tasks.create_task(work.at_a_rate(once))
            await work.goes_on()
            yield work
            work.end()
        await work.prove_complete()


def killed(stream: str) -> Break:
    return lambda cluster: cluster.servers[cluster.leader(stream)].kill()


def stopped(stream: str) -> Break:
    return lambda cluster: cluster.servers[cluster.leader(stream)].stop()


def two_away(cluster: Cluster) -> None:
    leader = cluster.leader("FACTS")
    for name in NAMES:
        if name != leader:
            cluster.servers[name].kill()


def isolated(cluster: Cluster) -> None:
    cluster.isolate(cluster.leader("FACTS"))


def without_disk(cluster: Cluster) -> None:
    cluster.servers[cluster.leader("EVIDENCE")].lose_disk()


STREAMS = ("", "FACTS", "KV_ROUNDS", "KV_LEASES", "EVIDENCE")
BREAKS: dict[str, Break] = {
    **{f"{stream or 'meta'} leader killed": killed(stream) for stream in STREAMS},
    **{f"{stream or 'meta'} leader stopped": stopped(stream) for stream in STREAMS},
    "a server isolated": isolated,
    "a disk lost": without_disk,
}
SHORT = "FACTS leader killed"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == SHORT else pytest.mark.chaos) for name in BREAKS],
)
async def test_work_goes_on_without_a_server(
    cluster: Cluster, job: str, tmp_path: Path, name: str
) -> None:
    async with at_work(cluster, job, tmp_path) as work:
        await asyncio.to_thread(BREAKS[name], cluster)
        await work.goes_on()
        await asyncio.to_thread(cluster.heal)
        await work.goes_on()


async def test_two_servers_away_and_back(cluster: Cluster, job: str, tmp_path: Path) -> None:
    """Meanwhile nothing is acknowledged, and nothing that was is lost."""
    async with at_work(cluster, job, tmp_path) as work:
        await asyncio.to_thread(two_away, cluster)
        facts = work.facts
        await until_async(lambda: work.facts > facts + 20, "facts wait on our own disk")
        await asyncio.to_thread(cluster.heal)
        await work.goes_on()


@pytest.mark.chaos
async def test_a_rolling_restart(cluster: Cluster, job: str, tmp_path: Path) -> None:
    async with at_work(cluster, job, tmp_path) as work:
        for name in NAMES:
            await asyncio.to_thread(cluster.servers[name].restart)
            await asyncio.to_thread(cluster.heal)
            await work.goes_on()
