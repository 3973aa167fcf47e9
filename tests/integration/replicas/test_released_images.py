"""From a person to the memory of a node: catalog, rendezvous and agent release what was marked."""

import asyncio
from pathlib import Path

from everstep.bus import connect, topology
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.server.dev_server import DevServer
from everstep.clock import SystemClock
from everstep.messages import ChangeCheckpoint, Done, OperatorActed, ReleaseImages
from everstep_services.rendezvous.service import Rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings
from tests.integration.catalog.replicas import at_work
from tests.integration.health.replicas import facts_of
from tests.integration.rendezvous.agents import Agent
from tests.integration.replicas.nodes import JOB, made, order, running
from tests.unit.rendezvous.world import spec
from tests.waiting import until_async
from trainer_sdk.checkpoint.image_folder import mark_image
from trainer_sdk.checkpoint.manifest import INDEX
from trainer_sdk.checkpoint.storage.checkpoints import CheckpointMark


async def test_who_asks_the_catalog_is_obeyed_by_the_agent_that_has_the_image(
    nats: DevServer, tmp_path: Path
) -> None:
    node = made("n0", tmp_path / "n0")
    async with (
        connect(nats.settings(ADMIN), "agents", spool=tmp_path / "agents") as agents_bus,
        connect(nats.settings(SERVICE), "services", spool=tmp_path / "services") as bus,
        asyncio.TaskGroup() as tasks,
    ):
        await topology.init(agents_bus.jetstream)
        rendezvous = Rendezvous(RendezvousSettings(), bus, SystemClock())
        serving = tasks.create_task(rendezvous.serve_for_ever())
        await rendezvous.answers.wait()
        agent = Agent(agents_bus, JOB, "n0", spec(1))
        async with at_work(bus), running([node]), agent.listening():
            await agent.join()
            await agent.started()
            node.keep.begins(order(0))
            index = node.save(0, 20)
            place = tmp_path / "n0" / "own" / "rank-0" / "a"
            mark_image(place, index.identity, CheckpointMark(reason="the loss is nan"))

            ask = ChangeCheckpoint(
                job=JOB, step=20, action="release", tier="memory", by="ann", reason="bad data"
            )
            done = await bus.ask("catalog", "change", ask, Done, job=JOB, within_s=30)
            assert not done.is_refused, done.text
            heard = await agent.heard(ReleaseImages)
            assert (heard.step, heard.by, heard.reason) == (20, "ann", "bad data")
            node.keep.ask(heard)
            await until_async(lambda: node.released, "it is released")
            (acted,) = await facts_of(bus, OperatorActed)
        serving.cancel()
        await asyncio.wait([serving])
    assert (place / INDEX).exists()
    assert (acted.action, acted.by, acted.outcome) == ("release_checkpoint", "ann", "accepted")
