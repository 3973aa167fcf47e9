"""What a job must have left behind: each fact once, in the stream and in the record; each blob."""

import asyncio
from collections import Counter

from everstep.bus import connect
from everstep.bus.facts.spool import unsent_bytes
from everstep.messages import BlobRef, Fact
from everstep.messages.codec import decode
from tests.cluster.servers import Cluster
from tests.e2e.cluster import Cluster as Agents
from tests.waiting import until


def prove_recorded(cluster: Cluster, agents: Agents) -> tuple[int, int]:
    """Return the numbers of facts and of blobs, once no process has facts of its own any more."""
    root = agents.folder.parent
    until(
        lambda: sum(unsent_bytes(folder) for folder in {it.parent for it in root.rglob("*.seg")}),
        "no fact waits on a disk", holds=lambda waiting: not waiting, despite=OSError,
    )  # fmt: skip
    facts, blobs = asyncio.run(_stored(cluster, agents.job))
    ids = Counter(fact.id for fact in facts)
    assert set(ids.values()) == {1}, "the stream has a fact twice"
    shown = until(lambda: _shown(agents), "history shows all", holds=lambda it: len(it) >= len(ids))
    assert Counter(shown) == ids
    return len(facts), blobs


def _shown(agents: Agents) -> list[str]:
    return [fact["id"] for fact in agents.api.pages("facts", {"job": agents.job}, most=None)]


async def _stored(cluster: Cluster, job: str) -> tuple[list[Fact], int]:
    facts: list[Fact] = []
    async with connect(cluster.settings("service"), "reader") as bus:
        async with bus.facts(None) as reader:
            while batch := (await reader.fetch(1000, 2)).facts:
                decoded = (decode(delivered.data) for delivered in batch)
                facts += [it for it in decoded if isinstance(it, Fact) and it.job == job]
        refs = [ref for fact in facts for ref in _blobs(fact)]
        for ref in refs:
            await bus.blobs.get(ref)  # raises where it is missing or damaged
    return facts, len(refs)


def _blobs(fact: Fact) -> list[BlobRef]:
    values = (getattr(fact, name) for name in fact.__struct_fields__)
    return [value for value in values if isinstance(value, BlobRef)]
