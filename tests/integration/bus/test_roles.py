"""What an agent of job A may say and hear: its own subjects, and nothing of job B (A13.2)."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep import subjects
from everstep.bus import connect, topology
from everstep.bus.auth.roles import AGENTS_RECORD, agent, login_name
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusDeniedError, BusError
from everstep.bus.server.dev_server import DevServer
from everstep.ids import BadNameError, new_id
from everstep.messages import FACTS, ProgressMade, kind_of

A, B = "job-a", "job-b"


@pytest.fixture
async def agent_a(nats: DevServer) -> AsyncIterator[NatsBus]:
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(connect(nats.settings("admin"), "setup"))
        await topology.init(admin.jetstream)
        service = await stack.enter_async_context(connect(nats.settings("service"), "svc"))
        for bucket in ("ROUNDS", "LIMITS", "CONTROL"):
            await service.documents(bucket).put(A, b"of a", revision=0)
            await service.documents(bucket).put(B, b"of b", revision=0)
        await nats.grant(B)
        yield await stack.enter_async_context(connect(await nats.grant(A), "agent"))


MAY_SAY = [
    subjects.beat(A, "n1"),
    subjects.timing(A, "n1"),
    *(subjects.fact(A, kind_of(fact)) for fact in AGENTS_RECORD),
    subjects.blob(A, "0" * 32, 0),
    subjects.log(A, 1, "n1", 0, "stdout"),
    subjects.log_index(A, 1, "n1"),
    *(
        subjects.ask("rendezvous", verb, A)
        for verb in ("join", "report", "leave", "drain", "restart", "stop")
    ),
    subjects.ask("logins", "renew", A),
    subjects.heard(A, "inbox", "1"),
    f"$JS.API.DIRECT.GET.KV_LIMITS.$KV.LIMITS.{A}",
]
MAY_NOT_SAY = [
    subjects.beat(B, "n1"),
    subjects.timing(B, "n1"),
    subjects.fact(B, "rank_exited"),
    subjects.fact(subjects.CLUSTER, "control_changed"),
    *(subjects.fact(A, kind_of(fact)) for fact in FACTS if fact not in AGENTS_RECORD),
    subjects.blob(B, "0" * 32, 0),
    subjects.log(B, 1, "n1", 0, "stdout"),
    subjects.log_index(B, 1, "n1"),
    f"$JS.API.DIRECT.GET.LOGS.{subjects.log(A, 1, 'n1', 0, 'stdout')}",
    "$JS.API.DIRECT.GET.LOGS",
    "$JS.API.STREAM.PURGE.LOGS",
    subjects.ask("rendezvous", "join", B),
    subjects.ask("rendezvous", "show", A),
    subjects.ask("rendezvous", "save", A),
    subjects.ask("health", "set_limit", A),
    subjects.ask("health", "control", A),
    subjects.ask("catalog", "collect", A),
    subjects.ask("logins", "renew", B),
    subjects.ask("logins", "renew", subjects.CLUSTER),
    subjects.heard(B, "inbox", "1"),
    subjects.order(A),
    subjects.order(B, "n1"),
    subjects.document("ROUNDS", A),
    subjects.document("ROUNDS", B),
    subjects.document("LIMITS", B),
    subjects.document("CONTROL", B),
    subjects.document("LEASES", B),
    subjects.document_news("ROUNDS", A),
    "$JS.API.STREAM.INFO.FACTS",
    "$JS.API.STREAM.DELETE.FACTS",
    "$JS.API.STREAM.PURGE.KV_ROUNDS",
    "$JS.API.STREAM.MSG.GET.KV_ROUNDS",
    "$JS.API.CONSUMER.CREATE.FACTS.mine",
    "$JS.API.DIRECT.GET.FACTS",
    f"$JS.API.DIRECT.GET.FACTS.{subjects.fact(A, 'rank_exited')}",
    f"$JS.API.DIRECT.GET.KV_ROUNDS.$KV.ROUNDS.{A}",
    f"$JS.API.DIRECT.GET.KV_CONTROL.$KV.CONTROL.{A}",
    f"$JS.API.DIRECT.GET.EVIDENCE.es.blob.{A}.x.0",
    f"$JS.API.DIRECT.GET.KV_LIMITS.$KV.LIMITS.{B}",
    f"$JS.API.DIRECT.GET.KV_LEASES.$KV.LEASES.{A}",
    f"$JS.API.DIRECT.GET.EVIDENCE.es.blob.{B}.x.0",
    "_INBOX.x",
    "_R_.x",
    "$SRV.PING",
    "$SYS.REQ.SERVER.PING",
    "$SYS.REQ.CLAIMS.UPDATE",
    "$SYS.REQ.USER.INFO",
]
MAY_HEAR = [
    subjects.order(A),
    subjects.order(A, "n1"),
    f"{subjects.order(A)}.>",
    subjects.document_news("LIMITS", A),
    "_INBOX.anything.>",
]
MAY_NOT_HEAR = [
    ">",
    "es.>",
    subjects.FACTS,
    subjects.fact(A),
    subjects.beat(),
    subjects.beat(B),
    subjects.timing(B),
    subjects.order(B),
    f"{subjects.order(B)}.>",
    subjects.document_news("ROUNDS", A),
    subjects.document_news("CONTROL"),
    subjects.document_news("LIMITS", B),
    "$KV.>",
    "$JS.>",
    "_R_.>",
    f"{subjects.heard(A)}",
    "$SRV.>",
    "$SYS.>",
]


async def test_an_agent_says_what_it_may_and_nothing_else(agent_a: NatsBus) -> None:
    for subject in MAY_NOT_SAY:
        with pytest.raises(BusDeniedError, match="may not publish"):
            await agent_a.jetstream.request(subject, b"{}", within_s=40)
    for subject in MAY_SAY:
        try:  # some are stored, some nobody answers: none is denied
            await agent_a.jetstream.request(subject, b"{}", within_s=0.2)
        except BusError as error:
            assert not isinstance(error, BusDeniedError), subject


async def test_an_agent_hears_what_it_may_and_nothing_else(agent_a: NatsBus) -> None:
    async def ignore(_: object) -> None:
        """Nothing comes."""

    connection = agent_a.jetstream.connection
    for subject in MAY_HEAR:
        async with connection.subscribed(subject, ignore):
            pass
    for subject in MAY_NOT_HEAR:
        with pytest.raises(BusDeniedError, match="user agent-job-a may not subscribe"):
            async with connection.subscribed(subject, ignore):
                pass


async def test_an_agent_reads_the_limits_of_its_job_and_nothing_else(agent_a: NatsBus) -> None:
    assert (await agent_a.documents("LIMITS").get(A)).data == b"of a"
    for bucket, key in (("LIMITS", B), ("ROUNDS", A), ("CONTROL", A)):
        with pytest.raises(BusDeniedError):
            await agent_a.documents(bucket).get(key)
    async with agent_a.documents("LIMITS").follow(A) as news:
        assert (await anext(news)).data == b"of a"


async def test_an_agent_hears_at_once_that_its_limits_have_changed(
    nats: DevServer, agent_a: NatsBus
) -> None:
    async with (
        agent_a.documents("LIMITS").follow(A) as news,
        connect(nats.settings("service"), "health") as health,
    ):
        assert (await anext(news)).data == b"of a"
        await health.documents("LIMITS").put(A, b"changed", revision=None)
        assert (await anext(news)).data == b"changed"


async def test_an_agent_keeps_evidence_of_its_own_job(nats: DevServer, agent_a: NatsBus) -> None:
    ref = await agent_a.blobs.put(A, b"evidence")
    with pytest.raises(BusDeniedError):
        await agent_a.blobs.put(B, b"forged")
    async with connect(nats.settings("service"), "history") as history:
        assert await history.blobs.get(ref) == b"evidence"


async def test_a_denied_fact_is_kept_aside_and_holds_up_no_other(
    nats: DevServer, agent_a: NatsBus, tmp_path: Path
) -> None:
    def fact(job: str) -> ProgressMade:
        return ProgressMade(
            id=new_id(), job=job, at=datetime.now(UTC), source="test", round=0, step=1
        )

    async with connect(nats.settings("agent", A), "recording", spool=tmp_path / "s") as bus:
        forged = fact(B)
        for one in (fact(A), forged, fact(A)):
            await bus.record(one)
        await bus.flush(40)
        assert bus.statistics()["facts_rejected_total"] == 1
    assert forged.id in (tmp_path / "s" / "rejected").read_text()
    async with connect(nats.settings("admin"), "look") as admin:
        info = await admin.jetstream.api("STREAM.INFO.FACTS")
    assert info["state"]["messages"] == 2


@pytest.mark.parametrize("job", ["a.b", "*", ">", "", "a b", "-x", "x" * 129, "a\r\nPUB x"])
def test_no_job_name_widens_what_its_agents_may(job: str) -> None:
    with pytest.raises(BadNameError):
        agent(job)


def test_a_login_belongs_to_one_role() -> None:
    assert login_name("agent", "x") == "agent-x"
    with pytest.raises(ValueError, match="is not a role"):
        login_name("root")
