"""Replicas of the catalog at work, and facts for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from everstep import ids
from everstep.bus.ports import Bus
from everstep.clock import SystemClock
from everstep.messages import (
    CheckpointCommitted,
    CheckpointPlace,
    CheckpointsLocated,
    ListCheckpoints,
    Member,
    ReplicaStored,
    RoundFormed,
)
from everstep.runtime import Loop
from everstep_services.catalog.replica import CatalogReplica
from everstep_services.catalog.settings import CatalogSettings
from trainer_sdk.checkpoint.manifest import step_name

QUICK = CatalogSettings(tend_every_s=0.05, degraded_after_s=0.0, repair_every_s=3600.0)


@asynccontextmanager
async def at_work(bus: Bus, settings: CatalogSettings = QUICK) -> AsyncIterator[CatalogReplica]:
    """One replica, all of its loops running, its questions heard."""
    catalog = CatalogReplica(settings, bus, SystemClock())
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(_run(loop)) for loop in catalog.loops]
        try:
            await catalog.answers.open.wait()
            yield catalog
        finally:
            for loop in loops:
                loop.cancel()


async def _run(loop: Loop) -> None:
    await loop()


async def places(bus: Bus, job: str, tier: str = "") -> tuple[CheckpointPlace, ...]:
    """What the catalog lists."""
    question = ListCheckpoints(job=job, tier=tier)
    found = await bus.ask("catalog", "list", question, CheckpointsLocated, job=job, within_s=30)
    return found.places


def about(job: str, **more: Any) -> dict[str, Any]:
    """What every fact says."""
    return {
        "id": ids.new_id(),
        "job": job,
        "at": datetime.now(UTC),
        "source": "agent/n0",
        "round": 1,
        **more,
    }


def committed(job: str, root: str, step: int, manifest_hash: str) -> CheckpointCommitted:
    return CheckpointCommitted(
        **about(job),
        step=step,
        tier="global",
        path=f"{root}/{step_name(step)}",
        size_bytes=8203,
        shards=3,
        world_size=2,
        manifest_hash=manifest_hash,
    )


def formed(job: str, nodes: int, round_: int = 1) -> RoundFormed:
    return RoundFormed(
        **about(job, round=round_),
        members=tuple(Member(slot=n, node=f"n{n}", first_rank=n, ranks=1) for n in range(nodes)),
        world_size=nodes,
        waited_s=0.1,
        allocation="a",
    )


def stored(job: str, slot: int, holder: str, *, step: int = 100, round_: int = 1) -> ReplicaStored:
    return ReplicaStored(
        **about(job, round=round_),
        owner_slot=slot,
        owner=f"n{slot}",
        holder=holder,
        step=step,
        size_bytes=4096,
    )
