"""What straggler asks others to do about a slow rank: nothing, until somebody enforces it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from everstep.bus import connect, topology
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.clock import SystemClock
from everstep.messages import OperatorActed, StragglerActed
from everstep_services.health.nodes.control import blank, switched
from everstep_services.health.settings import HealthSettings
from everstep_services.rendezvous.service import Rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings
from everstep_services.straggler.settings import StragglerSettings
from tests.fakes.clock import NotedClock
from tests.integration.health import replicas as health_replicas
from tests.integration.health.replicas import facts_of
from tests.integration.rendezvous.agents import Agent
from tests.integration.straggler.replicas import QUICK, Nodes, at_work, document, switch
from tests.unit.rendezvous.world import spec
from tests.waiting import until_async

STOPS: StragglerSettings = msgspec.structs.replace(QUICK, stop_reports=2)
EXCLUDES: StragglerSettings = msgspec.structs.replace(
    QUICK, exclude_after_s=0.2, stop_reports=1_000_000
)
RENDEZVOUS = RendezvousSettings(join_within_s=30, last_call_s=0.5)


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    """On a server of the test's own: an exclusion holds for all jobs."""
    async with connect(nats.settings(SERVICE), "straggler", spool=tmp_path / "spool") as bus:
        await topology.init(bus.jetstream)
        yield bus


async def acted(bus: NatsBus, job: str, nodes: Nodes) -> list[StragglerActed]:
    """What the policy did while one node stayed slow."""

    async def look() -> list[str]:
        nodes.send("n1")
        seen = await document(bus, job)
        if seen is None or seen.outbox:
            return []
        return [action for one in seen.found for action in one.acted]

    await until_async(look, "the policy has acted")
    return await facts_of(bus, StragglerActed, 1, job)


async def enforce(bus: NatsBus, job: str, *more: str) -> None:
    changes = dict.fromkeys(("modes.stop", "modes.exclude"), "enforce") | dict.fromkeys(more, "on")
    await switch(bus, job, switched(blank(), changes, "ann", "we trust it"))


async def test_without_a_mode_two_replicas_say_once_what_they_would_do(
    bus: NatsBus, nats: DevServer, job: str, tmp_path: Path
) -> None:
    async with (
        connect(nats.settings(SERVICE), "straggler", spool=tmp_path / "other") as other,
        at_work(bus, STOPS),
        at_work(other, STOPS),
    ):
        (fact,) = await acted(bus, job, Nodes(bus, job))
        await other.flush(30)
        assert len(await facts_of(bus, StragglerActed, 1, job)) == 1
    assert (fact.action, fact.outcome, fact.node, fact.rank) == ("stop", "observed", "n1", 1)
    assert "scores below 0.7 in 2 windows in a row, limit 2" in fact.reason
    assert "the mode or the brake allows only to observe" in fact.reason


async def test_the_brake_leaves_only_observation(bus: NatsBus, job: str) -> None:
    """Nothing acts while the brake is on (A15.4)."""
    await enforce(bus, job, "brake")
    async with at_work(bus, EXCLUDES):
        (fact,) = await acted(bus, job, Nodes(bus, job))
    assert (fact.action, fact.outcome) == ("exclude", "observed")


async def test_what_nobody_answers_is_refused_after_some_tries(bus: NatsBus, job: str) -> None:
    await enforce(bus, job)
    async with at_work(bus, STOPS, NotedClock(most_s=0.05)):
        (fact,) = await acted(bus, job, Nodes(bus, job))
    assert (fact.action, fact.outcome) == ("stop", "refused")
    assert "nobody answered" in fact.reason


async def test_a_node_without_a_slot_in_the_job_is_not_kept_out_of_others(
    bus: NatsBus, job: str
) -> None:
    """The holder of a job's login may name any node."""
    await enforce(bus, job)
    async with health_replicas.at_work(bus, HealthSettings()), at_work(bus, EXCLUDES):
        (fact,) = await acted(bus, job, Nodes(bus, job))
    assert (fact.action, fact.outcome) == ("exclude", "refused")
    assert f"n1 has no slot in round 1 of {job}" in fact.reason
    control = await health_replicas.control(bus)
    assert control is None or not control.exclusions


@pytest.fixture
async def agents(
    bus: NatsBus, nats: DevServer, job: str, tmp_path: Path
) -> AsyncIterator[list[Agent]]:
    """Two agents in a round that runs, with rendezvous and health."""
    async with (
        connect(nats.settings(SERVICE), "rendezvous", spool=tmp_path / "r") as theirs,
        asyncio.TaskGroup() as tasks,
        AsyncExitStack() as stack,
    ):
        service = Rendezvous(RENDEZVOUS, theirs, SystemClock())
        serving = tasks.create_task(service.serve_for_ever())
        await service.answers.wait()
        await stack.enter_async_context(health_replicas.at_work(theirs, HealthSettings()))
        agents = [Agent(bus, job, f"n{n}", spec(2, ranks_per_node=1)) for n in range(2)]
        for agent in agents:
            await stack.enter_async_context(agent.listening())
        await asyncio.gather(*(agent.join(infra_rank=n) for n, agent in enumerate(agents)))
        await asyncio.gather(*(agent.started() for agent in agents))
        await agents[0].report("first_step", step=1)
        yield agents
        serving.cancel()


async def asked_by_straggler(bus: NatsBus, job: str) -> tuple[str, str]:
    (one,) = await facts_of(bus, OperatorActed, 1, job)
    assert one.by == "straggler"
    return one.action, one.outcome


async def test_enforced_rendezvous_stops_the_job(
    bus: NatsBus, job: str, agents: list[Agent]
) -> None:
    await enforce(bus, job)
    async with at_work(bus, STOPS):
        (fact,) = await acted(bus, job, Nodes(bus, job))
    assert (fact.action, fact.outcome) == ("stop", "asked")
    assert "the job is stopped" in fact.reason
    shown = await agents[0].show()
    assert shown.planned is not None
    assert shown.planned.reason.startswith("straggler stopped the job: rank 1 scores below 0.7")
    assert await asked_by_straggler(bus, job) == ("stop_job", "accepted")


async def test_enforced_a_slow_node_is_kept_out_and_drained(
    bus: NatsBus, job: str, agents: list[Agent]
) -> None:
    """Health keeps the node out, and the round goes on without it where it can."""
    await enforce(bus, job)
    async with at_work(bus, EXCLUDES):
        (fact,) = await acted(bus, job, Nodes(bus, job))
    assert (fact.action, fact.outcome) == ("exclude", "asked")
    assert "n1 joins no round" in fact.reason
    assert "n1 leaves, and its agent exits with" in fact.reason
    control = await health_replicas.control(bus)
    assert control is not None
    assert [(one.node, one.by) for one in control.exclusions] == [("n1", "straggler")]
    shown = await agents[0].show()
    assert [seat.node for seat in shown.seats if seat.is_leaving] == ["n1"]
    assert await asked_by_straggler(bus, job) == ("drain_node", "accepted")
