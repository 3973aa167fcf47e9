"""Replicas of health at work, and what a test wants to know of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from everstep.bus.ports import Bus
from everstep.clock import Clock, SystemClock
from everstep.messages import (
    ControlDocument,
    Fact,
    LimitsDocument,
    NodesDocument,
    decode_as,
)
from everstep.messages.codec import decode
from everstep.runtime import Loop
from everstep_services.health.opening import Health
from everstep_services.health.settings import HealthSettings


@asynccontextmanager
async def at_work(
    bus: Bus, settings: HealthSettings, clock: Clock | None = None
) -> AsyncIterator[Health]:
    """One replica, all of its loops running, its questions heard."""
    health = Health(settings, bus, clock or SystemClock())
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


async def all_facts(bus: Bus) -> list[Fact]:
    """Every fact in the stream, in its order."""
    found: list[Fact] = []
    async with bus.facts(None) as reader:
        while batch := (await reader.fetch(1000, 0.2)).facts:
            messages = [decode(one.data) for one in batch]
            found += [message for message in messages if isinstance(message, Fact)]
    return found


async def limits(bus: Bus, job: str) -> LimitsDocument | None:
    found = await bus.documents("LIMITS").get(job)
    return None if found.data is None else decode_as(found.data, LimitsDocument)


async def control(bus: Bus) -> ControlDocument | None:
    found = await bus.documents("CONTROL").get("_cluster")
    return None if found.data is None else decode_as(found.data, ControlDocument)


async def register(bus: Bus) -> NodesDocument | None:
    found = await bus.documents("NODES").get("_cluster")
    return None if found.data is None else decode_as(found.data, NodesDocument)
