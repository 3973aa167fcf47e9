"""Ids of facts that services derive: the same in all replicas, and unknown to every job."""

import ast
import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import nats as nats_py
import pytest
from nats import errors as nats_errors
from nats.aio.client import Client

import everstep_services
from everstep import subjects
from everstep.bus import connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.derived_ids import DerivedIds
from everstep.bus.ports import Bus
from everstep.bus.server.dev_server import DevServer
from everstep.clock import SystemClock
from everstep.ids import id_from
from everstep.messages import FACTS, NodeBeat
from everstep_services.health.domain.findings import loss_of, return_of
from everstep_services.health.replica import HealthReplica
from everstep_services.health.settings import HealthSettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.waiting import WITHIN_S

A, B = "job-a", "job-b"


@asynccontextmanager
async def known(*buses: Bus) -> AsyncIterator[list[DerivedIds]]:
    """The ids of one service on each of these connections, begun at the same moment."""
    ids = [DerivedIds(bus, SystemClock()) for bus in buses]
    loops = [asyncio.create_task(of.keep_for_ever()) for of in ids]
    try:
        for of in ids:
            await asyncio.wait_for(of.known(), WITHIN_S)
        yield ids
    finally:
        for loop in loops:
            loop.cancel()


async def test_replicas_agree_also_after_a_restart_and_on_a_bus_that_lost_everything() -> None:
    server = MemoryServer()
    async with known(*(MemoryBus(server) for _ in range(4))) as ids:
        (made,) = {of.of("lost", "j", "n1") for of in ids}
        server.documents.clear()
        await ids[2]._stored()  # what it does every minute
    async with known(MemoryBus(server)) as (restarted,):
        assert restarted.of("lost", "j", "n1") == made
    async with known(MemoryBus(MemoryServer())) as (elsewhere,):
        assert elsewhere.of("lost", "j", "n1") != made
    assert id_from("lost", "j", "n1") != made


@pytest.fixture
async def attacker(nats: DevServer) -> AsyncIterator[Client]:
    """A plain client with the login of job A."""

    async def ignore(_: Exception) -> None:
        """Refusals are what we are here for."""

    login = str((await nats.grant(A)).credentials_file)
    client = await nats_py.connect(nats.url, user_credentials=login, error_cb=ignore)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def two_services(nats: DevServer, spools: Path) -> AsyncIterator[list[NatsBus]]:
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(connect(nats.settings("admin"), "setup"))
        await topology.init(admin.jetstream)
        yield [
            await stack.enter_async_context(
                connect(nats.settings("service"), name, spool=spools / name)
            )
            for name in ("health-1", "health-2")
        ]


async def test_no_job_can_take_the_id_of_a_fact_about_another_job(
    nats: DevServer, attacker: Client, tmp_path: Path
) -> None:
    """Job A records first, under every id that follows from what can be known of job B."""
    beat = NodeBeat(
        job=B, node="n1", sequence=7, at=datetime.now(UTC), state="running", round=1, slot=0
    )
    loss = loss_of(beat, 3.0, 2.5, blind_s=0.0, evidence="e")
    back = return_of(loss.id, beat, beat, 1.0)
    subject = subjects.fact(A, "rank_exited")
    async with two_services(nats, tmp_path) as (bus, other):
        replicas = [HealthReplica(HealthSettings(), one, SystemClock()) for one in (bus, other)]
        loops = [asyncio.create_task(one.ids.keep_for_ever()) for one in replicas]
        for replica in replicas:
            await asyncio.wait_for(replica.ids.known(), WITHIN_S)
        for taken in (loss.id, back.id):
            ack = await attacker.request(subject, b"{}", headers={"Nats-Msg-Id": taken})
            assert b'"duplicate"' not in ack.data
        for one, replica in zip((bus, other), replicas, strict=True):
            replica.observer._announce_loss(loss)
            replica.observer._announce_return(back)
            recording = asyncio.create_task(replica.records.record_for_ever())
            await replica.records.all_kept()
            await one.flush(WITHIN_S)
            recording.cancel()
        for loop in loops:
            loop.cancel()
        stored = await facts_of(bus, B)
    assert stored == ["node_lost", "node_returned"], "each once, and none was taken for a copy"


async def facts_of(bus: NatsBus, job: str) -> list[str]:
    """The kinds of the facts of a job in the stream, in order."""
    kinds: list[str] = []
    last = int((await bus.jetstream.api("STREAM.INFO.FACTS"))["state"]["last_seq"])
    async with bus.facts(None) as reader:
        at = 0
        while at < last:
            batch = await reader.fetch(1000, 1.0)
            at = batch.position.sequence
            kinds += [one.subject.split(".")[3] for one in batch.facts if f".{job}." in one.subject]
    return kinds


async def test_no_job_reads_or_replaces_the_key(nats: DevServer, attacker: Client) -> None:
    where = subjects.document("LEASES", "key_of_ids")
    async with connect(nats.settings("admin"), "setup") as bus:
        await topology.init(bus.jetstream)
        async with known(bus) as (ids,):
            before = ids.of("x")
            for subject, body in (
                (f"$JS.API.DIRECT.GET.KV_LEASES.{where}", b""),
                ("$JS.API.DIRECT.GET.KV_LEASES", b'{"last_by_subj":"%s"}' % where.encode()),
                ("$JS.API.STREAM.MSG.GET.KV_LEASES", b'{"last_by_subj":"%s"}' % where.encode()),
                (where, b"k" * 32),
            ):
                with pytest.raises((nats_errors.TimeoutError, nats_errors.NoRespondersError)):
                    await attacker.request(subject, body, timeout=0.3)
            async with known(bus) as (again,):
                assert again.of("x") == before


NOT_OF_FACTS = {
    "health/domain/findings.py",  # what the ids of facts follow from, with the key
    "health/domain/stalls.py",
    "history/notifications/notices.py",  # how a notice is written for people
    "history/notifications/payloads.py",  # what a target of notifications compares
    "history/webhooks/shapes.py",  # the id of an announcement of somebody else
}


def test_ids_without_a_key_are_not_ids_of_facts() -> None:
    services = Path(everstep_services.__path__[0])
    using = {
        str(path.relative_to(services))
        for path in services.rglob("*.py")
        if "id_from(" in path.read_text()
    }
    assert using == NOT_OF_FACTS


def test_each_service_gives_its_facts_random_ids_or_derived_ones() -> None:
    """Of facts whose id is written where they are made; `FactStamp` gives the others random ids."""
    services, facts = Path(everstep_services.__path__[0]), {kind.__name__ for kind in FACTS}
    given = {
        ast.unparse(keyword.value).partition("(")[0]
        for path in services.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in facts
        for keyword in call.keywords
        if keyword.arg == "id"
    }
    random = {"new_id", "now.new_id"}
    derived = {"self._ids.of", "self._derive"}
    assert given == random | derived
