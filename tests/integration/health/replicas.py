"""Replicas of health at work, and what a test wants to know of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from everstep.bus.client import NatsBus
from everstep.bus.ports import Bus
from everstep.clock import Clock, SystemClock
from everstep.messages import ControlDocument, Fact, LimitsDocument, NodesDocument, decode_as
from everstep.messages.codec import decode
from everstep.runtime import Loop
from everstep_services.health.replica import HealthReplica
from everstep_services.health.settings import HealthSettings
from tests.waiting import until_async

F = TypeVar("F", bound=Fact)


@asynccontextmanager
async def at_work(
    bus: Bus, settings: HealthSettings, clock: Clock | None = None
) -> AsyncIterator[HealthReplica]:
    """One replica, all of its loops running, its questions heard."""
    health = HealthReplica(settings, bus, clock or SystemClock())
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(_run(loop)) for loop in health.loops]
        try:
            await health.answers.open.wait()
            yield health
        finally:
            for loop in loops:
                loop.cancel()


async def _run(loop: Loop) -> None:
    await loop()


async def all_facts(bus: NatsBus) -> list[Fact]:
    """Every fact that is in the stream now, in its order; with all that `bus` has recorded."""
    await bus.flush(30)
    last = int((await bus.jetstream.api("STREAM.INFO.FACTS"))["state"]["last_seq"])
    found: list[Fact] = []
    at = 0
    async with bus.facts(None) as reader:
        while at < last:
            batch = await reader.fetch(1000, 5)
            at = batch.position.sequence
            messages = [decode(one.data) for one in batch.facts]
            found += [message for message in messages if isinstance(message, Fact)]
    return found


async def facts_of(bus: NatsBus, kind: type[F], count: int = 1, job: str = "") -> list[F]:
    """All facts of a kind, once there are `count` of them; of one job, if it is named."""

    async def look() -> list[F]:
        found = [fact for fact in await all_facts(bus) if isinstance(fact, kind)]
        return [fact for fact in found if job in ("", fact.job)]

    return await until_async(look, f"{count} {kind.__name__}", holds=lambda it: len(it) >= count)


async def limits(bus: Bus, job: str) -> LimitsDocument | None:
    found = await bus.documents("LIMITS").get(job)
    return None if found.data is None else decode_as(found.data, LimitsDocument)


async def control(bus: Bus) -> ControlDocument | None:
    found = await bus.documents("CONTROL").get("_cluster")
    return None if found.data is None else decode_as(found.data, ControlDocument)


async def register(bus: Bus) -> NodesDocument | None:
    found = await bus.documents("NODES").get("_cluster")
    return None if found.data is None else decode_as(found.data, NodesDocument)
