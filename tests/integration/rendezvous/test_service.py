"""Rendezvous on a real bus: rounds, lost agents, several replicas, a bus that goes away."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from everstep import subjects
from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError
from everstep.bus.server.dev_server import DevServer
from everstep.clock import SystemClock
from everstep.ids import new_id
from everstep.incident_causes import WAITS
from everstep.messages import (
    JobStarted,
    NameExcuse,
    NodeRecord,
    NodesDocument,
    RoundFormed,
    SaveCheckpoint,
    StallLocated,
    StartRanks,
    encode,
)
from everstep_services.rendezvous.service import Rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings
from tests.integration.rendezvous.agents import WITHIN_S, Agent
from tests.unit.rendezvous.world import spec
from tests.waiting import until_async

SETTINGS = RendezvousSettings(join_within_s=30, last_call_s=0.5)


@asynccontextmanager
async def replica(settings: BusSettings, spool: Path) -> AsyncIterator[NatsBus]:
    """One rendezvous in this process, on a connection of its own."""
    async with connect(settings, "rendezvous", spool=spool) as bus, asyncio.TaskGroup() as tasks:
        service = Rendezvous(SETTINGS, bus, SystemClock())
        serving = tasks.create_task(service.serve_for_ever())
        await service.answers.wait()
        yield bus
        serving.cancel()


@pytest.fixture
async def agents_bus(shared_nats: DevServer) -> AsyncIterator[NatsBus]:
    async with connect(shared_nats.settings(ADMIN), "agents") as bus:
        yield bus


async def test_a_round_forms_runs_ends_and_forms_again(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    async with replica(shared_nats.settings(SERVICE), tmp_path), AsyncExitStack() as stack:
        agents = [Agent(agents_bus, job, f"n{n}", spec(2)) for n in range(2)]
        for agent in agents:
            await stack.enter_async_context(agent.listening())
        await asyncio.gather(*(agent.join() for agent in agents))
        orders = await asyncio.gather(*(agent.started() for agent in agents))
        assert [(order.round, order.slot, order.world_size) for order in orders] == [
            (1, 0, 4),
            (1, 1, 4),
        ]
        await agents[0].report("first_step", step=1)
        told = await agents[1].report("rank_exited", rank=3, exit_code=1)
        assert told.is_current
        await asyncio.gather(*(agent.stopped() for agent in agents))
        await asyncio.gather(*(agent.join() for agent in agents))
        orders = await asyncio.gather(*(agent.started(after=1) for agent in agents))
        assert {order.round for order in orders} == {2}
        for agent in agents:
            await agent.report("finished")
        gone = await asyncio.gather(*(agent.sent_away() for agent in agents))
        assert {order.exit_code for order in gone} == {0}
        assert (await agents[0].show()).phase == "done"


async def test_an_agent_whose_connection_is_closed_is_replaced_at_once(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    async with replica(shared_nats.settings(SERVICE), tmp_path), AsyncExitStack() as stack:
        patient = msgspec.structs.replace(spec(2), stop_grace_s=10 * WITHIN_S)
        agents = [Agent(agents_bus, job, f"n{n}", patient) for n in range(3)]
        await stack.enter_async_context(agents[0].listening())
        await stack.enter_async_context(agents[2].listening())
        async with (
            connect(shared_nats.settings(ADMIN), "doomed") as own,
            Agent(own, job, "n1", patient).listening() as doomed,
        ):
            await asyncio.gather(agents[0].join(), doomed.join())
            await asyncio.gather(agents[0].started(), doomed.started())
            assert (await agents[2].join()).standing == "spare"
        await agents[0].report("rank_exited", fingerprint="secondary:x", exit_code=1)
        await agents[0].stopped()
        await agents[0].join()
        orders = await asyncio.gather(agents[0].started(1), agents[2].started(1))
        assert [(order.round, order.slot) for order in orders] == [(2, 0), (2, 1)]
        incident = (await agents[0].show()).incident
        assert incident is not None
        assert (incident.trigger, incident.node) == ("node_lost", "n1")


async def test_where_health_locates_a_stall_is_the_reason_that_waiting_ranks_get(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    async with replica(shared_nats.settings(SERVICE), tmp_path), AsyncExitStack() as stack:
        agents = [Agent(agents_bus, job, f"n{n}", spec(2)) for n in range(2)]
        for agent in agents:
            await stack.enter_async_context(agent.listening())
        await asyncio.gather(*(agent.join() for agent in agents))
        await asyncio.gather(*(agent.started() for agent in agents))
        finding = StallLocated(
            id=new_id(), job=job, at=SystemClock().wall(), source="health", round=1,
            first_ranks=(0,), nodes=("n0",), waiting_ranks=3, is_certain=True, reason="it began",
        )  # fmt: skip
        agents_bus.send(subjects.lost(job, "n0"), finding)

        async def cause() -> str:
            told = await agents[1].report(
                "rank_stalled", rank=2, waited_s=9.0, fingerprint=WAITS, is_fatal=False
            )
            return told.cause

        assert await until_async(cause, "the finding has come") == "it began"


async def test_a_node_that_health_suspects_makes_way_for_a_spare_though_health_is_away(
    nats: DevServer, tmp_path: Path, job: str
) -> None:
    """A suspect is skipped; a damaged register suspects nobody (A10.4, A10.6)."""
    async with (
        connect(nats.settings(ADMIN), "agents") as bus,
        connect(nats.settings(SERVICE), "rendezvous", spool=tmp_path) as own,
        asyncio.TaskGroup() as tasks,
        AsyncExitStack() as stack,
    ):
        await topology.init(bus.jetstream)
        service = Rendezvous(SETTINGS, own, SystemClock())
        serving = tasks.create_task(service.serve_for_ever())
        await service.answers.wait()
        agents = [Agent(bus, job, f"n{n}", spec(2)) for n in range(3)]
        for agent in agents:
            await stack.enter_async_context(agent.listening())
        await asyncio.gather(agents[0].join(), agents[1].join())
        await asyncio.gather(agents[0].started(), agents[1].started())
        assert (await agents[2].join()).standing == "spare"
        records = (
            NodeRecord(node="n0", strikes=(), reason="cleared long ago"),
            NodeRecord(node="n1", suspicion="0" * 32, cause="incidents", reason="3 strikes"),
        )
        document = encode(NodesDocument(nodes=records))
        await bus.documents("NODES").put(subjects.CLUSTER, document, revision=0)
        await until_async(lambda: service.statistics()["suspects"] == 1, "the suspect is known")
        await agents[0].report("rank_exited", exit_code=1)
        await asyncio.gather(agents[0].stopped(), agents[1].stopped())
        await asyncio.gather(agents[0].join(), agents[1].join())
        orders = await asyncio.gather(agents[0].started(1), agents[2].started(1))
        assert [(order.round, order.slot) for order in orders] == [(2, 0), (2, 1)]
        await bus.documents("NODES").put(subjects.CLUSTER, b"no document", revision=None)
        await bus.documents("NODES").delete(subjects.CLUSTER, revision=None)
        await until_async(lambda: not service.statistics()["suspects"], "nobody is suspect")
        serving.cancel()


async def test_replicas_take_turns_and_the_death_of_one_is_not_noticed(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    """All nodes report a failure at once, and it is one incident (A11.5)."""
    settings, nodes = shared_nats.settings(SERVICE), 12
    async with AsyncExitStack() as stack:
        doomed = await stack.enter_async_context(AsyncExitStack())
        await doomed.enter_async_context(replica(settings, tmp_path / "a"))
        for name in ("b", "c"):
            await stack.enter_async_context(replica(settings, tmp_path / name))
        agents = [Agent(agents_bus, job, f"n{n}", spec(nodes)) for n in range(nodes)]
        for agent in agents:
            await stack.enter_async_context(agent.listening())
        await asyncio.gather(*(agent.join() for agent in agents))
        orders = await asyncio.gather(*(agent.started() for agent in agents))
        assert sorted(order.slot for order in orders) == list(range(nodes))
        told = await asyncio.gather(*(agent.report("rank_exited", exit_code=1) for agent in agents))
        assert len({reply.incident for reply in told}) == 1
        await asyncio.gather(*(agent.stopped() for agent in agents))
        await doomed.aclose()
        await asyncio.gather(*(agent.join() for agent in agents))
        orders = await asyncio.gather(*(agent.started(1) for agent in agents))
        assert {order.round for order in orders} == {2}
        assert {agent.node: order.slot for agent, order in zip(agents, orders, strict=True)} == {
            agent.node: n for n, agent in enumerate(sorted(agents, key=lambda a: int(a.node[1:])))
        }
        left = await asyncio.gather(*(agent.report("finished") for agent in agents))
        assert left[-1].is_current


async def test_every_fact_is_recorded_once_and_taken_out_of_the_document(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    async with (
        replica(shared_nats.settings(SERVICE), tmp_path),
        Agent(agents_bus, job, "n0", spec(1)).listening() as agent,
        agents_bus.subscribe(subjects.fact(job, "round_formed"), RoundFormed) as formed,
        agents_bus.subscribe(subjects.fact(job, "job_started"), JobStarted) as jobs,
    ):
        await agent.join()
        await agent.started()
        async with asyncio.timeout(WITHIN_S):
            assert (await jobs.get()).spec == agent.spec
            assert (await formed.get()).round == 1
        documents = agents_bus.documents("ROUNDS")
        async with asyncio.timeout(WITHIN_S), documents.follow(job) as revisions:
            async for revision in revisions:
                if revision.data is not None and b'"outbox"' not in revision.data:
                    break


async def test_while_the_bus_is_away_nothing_is_decided_and_all_goes_on_after(
    nats: DevServer, tmp_path: Path, job: str
) -> None:
    """NATS is killed: the round stays, and the next one forms (A2.6, A15.2)."""
    async with connect(nats.settings(ADMIN), "setup") as bus:
        await topology.init(bus.jetstream)
    async with (
        replica(nats.settings(SERVICE), tmp_path / "spool"),
        connect(nats.settings(ADMIN), "agents") as bus,
        Agent(bus, job, "n0", spec(2)).listening() as first,
        Agent(bus, job, "n1", spec(2)).listening() as second,
    ):
        await asyncio.gather(first.join(), second.join())
        await asyncio.gather(first.started(), second.started())
        os.kill(nats.pid, signal.SIGKILL)
        await until_async(lambda: nats.restarts, "the server is started again")
        reply = await first.join_when_heard(running=first.start)
        assert (reply.standing, reply.round, (await first.show()).phase) == ("member", 1, "running")
        await first.report("rank_exited", exit_code=1)
        await asyncio.gather(first.stopped(), second.stopped())
        await asyncio.gather(first.join(), second.join())
        orders = await asyncio.gather(first.started(1), second.started(1))
        assert {order.round for order in orders} == {2}


async def test_a_report_about_a_job_without_a_document_harms_nobody(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    async with replica(shared_nats.settings(SERVICE), tmp_path):
        agent = Agent(agents_bus, job, "n0", spec(1))
        agent.start = StartRanks(
            id="0" * 32,
            job=job,
            round=3,
            reason="",
            slot=0,
            slots=1,
            first_rank=0,
            ranks=1,
            world_size=1,
            master_address="",
            master_port=1,
        )
        reply = await agent.report("started")
        assert (reply.round, reply.is_current) == (3, False)
        with pytest.raises(AskRefusedError, match="there is no job"):
            await agent.show()


async def test_a_document_that_cannot_be_read_stops_its_own_job_only(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    broken, rounds = f"{job}-broken", agents_bus.documents("ROUNDS")
    await rounds.put(broken, b"\x00no document", revision=0)
    async with replica(shared_nats.settings(SERVICE), tmp_path):
        with pytest.raises(AskRefusedError, match="cannot be read"):
            await Agent(agents_bus, broken, "n0", spec(1)).join()
        agent = Agent(agents_bus, job, "n0", spec(1))
        async with agent.listening():
            await agent.join()
            assert (await agent.started()).round == 1
    await rounds.delete(broken, revision=None)


@asynccontextmanager
async def two_of_each(
    settings: BusSettings, agents_bus: NatsBus, job: str, folder: Path
) -> AsyncIterator[list[Agent]]:
    """Two agents whose round has started, and two replicas, either of which may hear them."""
    async with (
        replica(settings, folder / "one"),
        replica(settings, folder / "two"),
        AsyncExitStack() as stack,
    ):
        agents = [Agent(agents_bus, job, f"n{n}", spec(2)) for n in range(2)]
        for agent in agents:
            await stack.enter_async_context(agent.listening())
        await asyncio.gather(*(agent.join() for agent in agents))
        await asyncio.gather(*(agent.started() for agent in agents))
        yield agents


async def test_a_stall_is_excused_by_another_node_whichever_replica_hears_it(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    settings = shared_nats.settings(SERVICE)
    async with two_of_each(settings, agents_bus, job, tmp_path) as agents:
        await agents[1].report("rank_stalled", rank=2, waited_s=40.0)
        asked = await agents[0].heard(NameExcuse)
        assert (asked.node, asked.rank) == ("n1", 2)
        await agents[0].report("excused", rank=2, excuse_s=600.0)
        (stall,) = (await agents[0].show()).stalls
        assert stall.excused_s > 0
        await agents[1].report("rank_recovered", rank=2)
        assert (await agents[0].show()).stalls == ()

        await agents[1].report("rank_stalled", rank=2, waited_s=50.0)
        orders = await asyncio.gather(*(agent.stopped() for agent in agents))
        assert {order.cause for order in orders} == {"rank_stalled"}


async def test_one_step_to_save_after_is_agreed_on_whichever_replica_hears_how_far_ranks_are(
    shared_nats: DevServer, agents_bus: NatsBus, job: str, tmp_path: Path
) -> None:
    settings = shared_nats.settings(SERVICE)
    async with two_of_each(settings, agents_bus, job, tmp_path) as agents:
        await agents[0].report("preempted", grace_s=600.0)
        for agent in agents:
            await agent.heard(SaveCheckpoint)
            await agent.report("reached", step=100, step_s=1.0, last_progress_age_s=0.0)
        for agent in agents:
            while (order := await agent.heard(SaveCheckpoint)).after_step is None:
                pass
            assert (order.after_step, order.then_stop) == (103, True)
