"""One job whose checkpoints the catalog knows, on a bus of the test's own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from everstep.bus import connect, topology
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import ChangeCheckpoint, Done
from tests.checkpoint_helpers.checkpoint_shelves import save
from tests.integration.catalog.replicas import (
    committed,
    places,
)
from tests.integration.health.replicas import F, all_facts

JOB = "llama"


@asynccontextmanager
async def opened_bus(nats: DevServer, folder: Path) -> AsyncIterator[NatsBus]:
    """A bus of the test's own: how far facts were read belongs to no job."""
    async with connect(nats.settings(SERVICE), "test", spool=folder / "test") as bus:
        await topology.init(bus.jetstream)
        yield bus


async def publish(bus: NatsBus, root: str, *steps: int) -> None:
    """Checkpoints in files, and the facts about them."""
    for step in steps:
        await bus.record(committed(JOB, root, step, save(root, JOB, step)))
    await bus.flush(30)


async def change(bus: NatsBus, action: str, step: int) -> Done:
    ask = ChangeCheckpoint(job=JOB, step=step, action=action, by="ann", reason="why not")
    return await bus.ask("catalog", "change", ask, Done, job=JOB, within_s=30)


async def steps(bus: NatsBus) -> list[int]:
    return [one.step for one in await places(bus, JOB)]


async def seen(bus: NatsBus, kind: type[F]) -> list[F]:
    return [fact for fact in await all_facts(bus) if isinstance(fact, kind)]
