"""What counts as stored and as read, when some of three servers are away or lag behind."""

import asyncio
import uuid

import pytest

from everstep.bus import connect
from everstep.bus.errors import BlobMissingError, BusError
from everstep.bus.ports import Document
from everstep.bus.topology import EVIDENCE_STREAM
from everstep.hashing import hash_of
from everstep.messages import BlobRef
from tests.cluster.servers import NAMES, Cluster
from tests.waiting import until_async

LAG_S = 0.05
"""By how much a server lags: more than a write takes, less than an election waits."""


async def away(cluster: Cluster, *names: str) -> None:
    for name in names:
        await asyncio.to_thread(cluster.servers[name].stop)


def others(name: str) -> list[str]:
    return [other for other in NAMES if other != name]


async def test_evidence_that_only_a_leader_has_heard_of_is_not_stored(
    cluster: Cluster, job: str
) -> None:
    leader = await asyncio.to_thread(cluster.leader, EVIDENCE_STREAM)
    await cluster.grant(job)
    settings = cluster.settings(f"agent-{job}", leader, request_within_s=1.0)
    async with connect(settings, "agent") as bus:
        known = await bus.blobs.put(job, b"known")
        await away(cluster, *others(leader))
        for _ in range(2):  # the first is proposed, and the second one meets it
            with pytest.raises(BusError, match="stored by most servers|no answer"):
                await bus.blobs.put(job, b"lost")
        assert await bus.blobs.put(job, b"known") == known
        await asyncio.to_thread(cluster.heal)
        stored = await until_async(
            lambda: bus.blobs.put(job, b"lost"), "it is stored", despite=(BusError,)
        )
    async with connect(cluster.settings("service"), "reader") as reader:
        assert await reader.blobs.get(stored) == b"lost"
        assert await reader.blobs.get(known) == b"known"


async def test_the_same_evidence_put_by_many_at_once_is_stored_for_each(
    cluster: Cluster, job: str
) -> None:
    async with connect(cluster.settings("service"), "test") as bus:
        content = [uuid.uuid4().bytes] * 8
        refs = await asyncio.gather(*(bus.blobs.put(job, each) for each in content))
        assert len(set(refs)) == 1
        assert await bus.blobs.get(refs[0]) == content[0]


async def test_a_server_that_lags_behind_takes_nothing_back(cluster: Cluster, job: str) -> None:
    """Its copy of the stream is older than what this client has written and read."""
    leader = await asyncio.to_thread(cluster.leader, "KV_CONTROL")
    behind = others(leader)[0]
    async with (
        connect(cluster.settings("service", behind), "behind") as bus,
        connect(cluster.settings("service", leader), "leader") as writer,
    ):
        documents, written = bus.documents("CONTROL"), writer.documents("CONTROL")
        await written.put(job, b"0", revision=None)
        for pair, link in cluster.routes.items():
            if behind in pair:
                link.delay(LAG_S)
        for number in range(12):  # a copy that answers is chosen by chance
            revision = await written.put(job, b"%d" % number, revision=None)
            assert await documents.get(job) == Document(job, b"%d" % number, revision)
            await bus.prove()
        held = await writer.leases.acquire(job, "writer", 20)
        assert held is not None
        assert await bus.leases.acquire(job, "behind", 20) is None
        ref = await writer.blobs.put(job, b"just written")
        assert await bus.blobs.get(ref) == b"just written"
        with pytest.raises(BlobMissingError):
            await bus.blobs.get(BlobRef(job=job, id=hash_of(b""), size_bytes=1, parts=1))
