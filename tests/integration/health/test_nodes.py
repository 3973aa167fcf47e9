"""Nodes on a real bus: strikes that survive, exclusions that bind, questions that are audited."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from everstep import ids
from everstep.bus import connect, topology
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError, BusDeniedError
from everstep.bus.ports import Bus
from everstep.bus.server.dev_server import DevServer
from everstep.clock import Clock, SystemClock
from everstep.messages import (
    ActionDecided,
    CheckResult,
    ControlChanged,
    ControlDocument,
    Done,
    ExcludeNode,
    Fact,
    IncidentClosed,
    IncludeNode,
    Ledger,
    NodeCheckFinished,
    NodeExcluded,
    NodeIncluded,
    NodeLost,
    NodesDocument,
    NodeStanding,
    NodeStandings,
    NodeSuspected,
    OperatorActed,
    Question,
    SetControl,
    ShowNodes,
    encode,
)
from everstep.messages.facts.incidents import CHECK_CONFIRMED
from everstep.subjects import CLUSTER
from everstep_services.health.replica import HealthReplica
from everstep_services.health.settings import HealthSettings, NodeSettings
from tests.integration.bus.servers import granted
from tests.integration.health.replicas import at_work, control, facts_of, register
from tests.unit.rendezvous.documents import seated
from tests.waiting import until_async

QUICK = HealthSettings(nodes=NodeSettings(judge_every_s=0.05, check_window_s=60.0))


class ShiftedClock(SystemClock):
    """The system's, hours ahead on the wall."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def wall(self) -> datetime:
        return super().wall() + self.ahead


@pytest.fixture
async def own(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    """A bus of the test's own: what health knows of nodes belongs to no job."""
    async with connect(nats.settings(SERVICE), "test", spool=tmp_path / "test") as bus:
        await topology.init(bus.jetstream)
        yield bus


@asynccontextmanager
async def working(
    nats: DevServer, tmp_path: Path, settings: HealthSettings = QUICK, clock: Clock | None = None
) -> AsyncIterator[HealthReplica]:
    """A replica of health with a bus of its own."""
    async with (
        connect(nats.settings(SERVICE), "health", spool=tmp_path / "one") as bus,
        at_work(bus, settings, clock) as replica,
    ):
        yield replica


def failing(node: str, at: datetime, check: str = "gpu") -> NodeCheckFinished:
    result = CheckResult(check=check, state="failed", failure_class="replace", reason="broken")
    return checked(node, at, result)


def checked(node: str, at: datetime, *results: CheckResult) -> NodeCheckFinished:
    return NodeCheckFinished(
        id=ids.new_id(),
        job="j",
        at=at,
        source=f"agent/{node}",
        node=node,
        occasion="periodic",
        is_healthy=not results,
        took_s=1.0,
        results=results,
        checks=("gpu", "nic"),
    )


async def seat(bus: NatsBus, job: str, *nodes: str) -> None:
    """Rendezvous has given each a slot in the job."""
    document = encode(seated(job, nodes))
    await bus.documents("ROUNDS").put(job, document, revision=None)


async def fail_for_long(bus: NatsBus, *nodes: str) -> None:
    """In two windows, as their agents say; two other nodes are well for each."""
    now = datetime.now(UTC)
    wells = [f"{node}-well-{number}" for node in nodes for number in (1, 2)]
    await seat(bus, "j", *nodes, *wells)
    for minutes in (10, 5):
        at = now - timedelta(minutes=minutes)
        for node in nodes:
            for well in (f"{node}-well-1", f"{node}-well-2"):
                await bus.record(checked(well, at))
            await bus.record(failing(node, at))
    await bus.flush(40)


async def ask(bus: Bus, verb: str, of: type[Question], **fields: Any) -> Done:
    question = of(**{"job": CLUSTER, "by": "ann", "reason": "because", **fields})
    return await bus.ask("health", verb, question, Done, job=CLUSTER, within_s=40)


async def nodes(bus: Bus, *names: str) -> dict[str, NodeStanding]:
    question = ShowNodes(job=CLUSTER, nodes=names)
    found = await bus.ask("health", "nodes", question, NodeStandings, job=CLUSTER, within_s=40)
    return {one.node: one for one in found.nodes}


async def said(bus: NatsBus, of: type[Fact], times: int = 1) -> list[Any]:
    """The facts of a kind, once there are `times`."""
    return list(await facts_of(bus, of, times))


async def excluded(bus: Bus, *names: str) -> ControlDocument:
    return await until_async(
        lambda: control(bus),
        f"{names} are excluded",
        holds=lambda d: {one.node for one in d.exclusions} == set(names),
    )


async def test_health_observes_then_enforces_then_the_time_passes(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    clock = ShiftedClock()
    async with working(nats, tmp_path, QUICK, clock):
        await fail_for_long(own, "n1")
        (observed,) = await said(own, NodeExcluded)
        assert (observed.mode, observed.node, observed.by) == ("observe", "n1", "health")
        assert await control(own) is None, "only said"
        changes = {"modes.exclude": "enforce"}
        done = await ask(own, "control", SetControl, changes=changes, origin="cli")
        assert done.text == "changed: modes.exclude"
        await own.record(failing("n1", datetime.now(UTC)))  # again: something new
        _, enforced = await said(own, NodeExcluded, 2)
        assert enforced.mode == "enforce"
        document = await excluded(own, "n1")
        (exclusion,) = document.exclusions
        assert exclusion.by == "health"
        assert exclusion.until == enforced.at + timedelta(days=1)
        clock.ahead = timedelta(days=1)
        await excluded(own)
        (included,) = await said(own, NodeIncluded)
        assert (included.node, included.by) == ("n1", "health")
        (changed,) = await said(own, ControlChanged)
        assert (changed.name, changed.before, changed.after, changed.origin) == (
            "modes.exclude",
            "",
            "enforce",
            "cli",
        )


async def leaves_by_probe(own: NatsBus, node: str) -> None:
    """Rendezvous has compared, and the node leaves the job `j`."""
    await own.record(
        ActionDecided(
            id=ids.new_id(),
            job="j",
            at=datetime.now(UTC),
            source="rendezvous",
            action="exclude",
            reason="nic fails on 1 of 2 nodes, and passes on 1",
            rule=CHECK_CONFIRMED,
            nodes_out=(node,),
            check="nic",
        )
    )


async def test_a_probe_that_another_node_passes_excludes_its_node_where_that_is_allowed(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    """No switch is needed; a node without a seat in that job is not accused (A10.3)."""
    allowed = replace(QUICK, nodes=replace(QUICK.nodes, exclude_by_probes=True))
    async with working(nats, tmp_path, allowed):
        await seat(own, "j", "n1", "n2")
        for node in ("n-of-another-job", "n1"):
            await leaves_by_probe(own, node)
        (exclusion,) = (await excluded(own, "n1")).exclusions
        assert exclusion.by == "health"
        assert "j: nic fails on 1 of 2 nodes" in exclusion.reason
        changes = {"modes.exclude": "observe"}
        await ask(own, "control", SetControl, changes=changes)
        standing = (await nodes(own, "n1"))["n1"]
        assert standing.exclusion is not None
        await ask(own, "include", IncludeNode, node="n1")
        await excluded(own)


async def test_a_job_keeps_no_node_out_of_other_jobs_by_its_own_word(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    """The policy is the job's, and so are both results: by default health only observes."""
    async with working(nats, tmp_path):
        await seat(own, "j", "n1", "n2")
        await leaves_by_probe(own, "n1")
        (observed,) = await said(own, NodeExcluded)
        assert (observed.node, observed.mode) == ("n1", "observe")
        assert (await nodes(own, "n1"))["n1"].exclusion is None


async def test_two_replicas_decide_once_and_the_second_takes_over(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    settings = nats.settings(SERVICE)
    async with (
        connect(settings, "health", spool=tmp_path / "one") as one,
        connect(settings, "health", spool=tmp_path / "other") as other,
    ):
        async with at_work(one, QUICK) as first:
            await until_async(lambda: first.statistics()["judging"], "the first has the lease")
            async with at_work(other, QUICK) as second:
                await fail_for_long(own, "n1")
                assert len(await said(own, NodeExcluded)) == 1
                assert second.statistics()["judging"] == 0
        async with at_work(other, QUICK) as second:
            await until_async(lambda: second.statistics()["judging"], "the other has it")
            await fail_for_long(own, "n2")
            found = await said(own, NodeSuspected, 2)
    assert [fact.node for fact in found] == ["n1", "n2"]


_SUSPECT_AFTER = 3


async def test_strikes_are_counted_over_restarts_of_health_and_of_the_bus(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    """Three jobs lose a node, and it is suspect (A10.6)."""
    settings = nats.settings(SERVICE)
    suspicions: list[NodeSuspected] = []

    async def lose(count: int) -> None:
        loss = NodeLost(
            id=ids.new_id(),
            job=f"job-{count}",
            at=datetime.now(UTC),
            source="health",
            node="n1",
            silence_s=3.0,
            limit_s=3.0,
            reason="silent",
        )
        async with connect(settings, "health", spool=tmp_path / "one") as bus, at_work(bus, QUICK):
            await own.wait_connected()
            await seat(own, loss.job, "n1")
            await own.record(loss)
            await until_async(
                lambda: register(own), "a strike", holds=lambda d: _strikes(d) == count
            )
            if count == _SUSPECT_AFTER:
                suspicions.extend(await said(own, NodeSuspected))

    await lose(1)
    await lose(2)
    os.kill(nats.pid, signal.SIGKILL)
    await until_async(lambda: not own.connected, "the bus is gone")
    await lose(_SUSPECT_AFTER)
    (suspected,) = suspicions
    assert (suspected.strikes, suspected.cause) == (3, "incidents")
    assert "lost by job-1" in suspected.reason


def _strikes(document: NodesDocument) -> int:
    return sum(len(one.strikes) for one in document.nodes if one.node == "n1")


async def test_health_that_was_away_reads_what_was_said_meanwhile(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    await fail_for_long(own, "n1")
    async with working(nats, tmp_path):
        assert len(await said(own, NodeExcluded)) == 1


async def test_a_policy_excludes_only_a_share_of_the_nodes(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    async with working(nats, tmp_path):
        policy = {"by": "attribution", "origin": "service"}
        for again in range(2):
            done = await ask(own, "exclude", ExcludeNode, node="n1", **policy)
            assert not done.is_refused, again
        done = await ask(own, "exclude", ExcludeNode, node="n2", **policy)
        assert done.is_refused
        assert done.text.startswith("attribution has excluded 1 nodes, the most of")
        await ask(own, "exclude", ExcludeNode, node="n3")
        await excluded(own, "n1", "n3")
        await ask(own, "include", IncludeNode, node="n1")
        assert not (await ask(own, "exclude", ExcludeNode, node="n2", **policy)).is_refused


async def test_people_exclude_and_include_and_all_of_it_is_on_record(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    async with working(nats, tmp_path):
        done = await ask(own, "exclude", ExcludeNode, node="n1", ttl_s=0.0, origin="rest")
        assert done.text.startswith("n1 joins no round until somebody includes it")
        await ask(own, "exclude", ExcludeNode, node="n2")
        document = await excluded(own, "n1", "n2")
        assert document.exclusions[0].until is None
        assert document.exclusions[1].until is not None
        standing = await nodes(own, "n1", "n3")
        assert [(n, one.state) for n, one in standing.items()] == [
            ("n1", "excluded"),
            ("n3", "unknown"),
        ]
        await ask(own, "include", IncludeNode, node="n1")
        assert (await ask(own, "include", IncludeNode, node="n9")).text.startswith("n9 is not ex")
        await excluded(own, "n2")
        for verb, of, fields, why in (
            ("exclude", ExcludeNode, {"node": "n1", "by": "health"}, "give your own"),
            (
                "exclude",
                ExcludeNode,
                {"node": "n1", "ttl_s": -1.0},
                "cannot exclude a node for -1 s",
            ),
            ("exclude", ExcludeNode, {"node": "*"}, "cannot name a node"),
            ("control", SetControl, {"changes": {"brake": "maybe"}}, "brake cannot be 'maybe'"),
        ):
            with pytest.raises(AskRefusedError, match=why):
                await ask(own, verb, of, **fields)
        acts = await said(own, OperatorActed, 8)
    assert sorted((act.action, act.target, act.outcome) for act in acts) == [
        ("exclude_node", "*", "refused"),
        ("exclude_node", "n1", "accepted"),
        ("exclude_node", "n1", "refused"),
        ("exclude_node", "n1", "refused"),
        ("exclude_node", "n2", "accepted"),
        ("include_node", "n1", "accepted"),
        ("include_node", "n9", "accepted"),
        ("set_control", "brake=maybe", "refused"),
    ]


async def test_an_agent_cannot_exclude_nodes_of_others(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    agent = await granted(nats, "j")
    async with (
        connect(nats.settings(SERVICE), "health", spool=tmp_path / "one") as bus,
        connect(agent, "agent") as agent_bus,
        at_work(bus, QUICK),
    ):
        question = ExcludeNode(job="j", node="n1", by="agent", reason="mine")
        with pytest.raises(BusDeniedError, match="may not publish to es.ask.health.exclude.j"):
            await agent_bus.ask("health", "exclude", question, Done, job="j", within_s=40)
        with pytest.raises(AskRefusedError, match="an exclusion holds for all jobs"):
            await own.ask("health", "exclude", question, Done, job="j", within_s=40)
        assert await control(own) is None


async def test_a_jobs_login_says_nothing_against_nodes_of_others(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    """Neither a failed check nor a loss that it makes up is a strike (A8, A10.6)."""
    login, now = await granted(nats, "j"), datetime.now(UTC)
    lost = IncidentClosed(
        id=ids.new_id(), job="j", at=now, source="agent/x", incident="i", outcome="failed",
        reason="", ledger=Ledger(), trigger="node_lost", node="victim",
    )  # fmt: skip
    async with (
        connect(nats.settings(SERVICE), "health", spool=tmp_path / "one") as bus,
        connect(login, "liar", spool=tmp_path / "liar") as liar,
        at_work(bus, QUICK),
    ):
        for check in ("gpu", "nic"):
            await liar.record(failing("victim", now, check))
        await liar.record(lost)
        await liar.flush(40)
        await fail_for_long(own, "n1")
        (suspected,) = await said(own, NodeSuspected)
        document = await register(own)
    assert suspected.node == "n1"
    assert document is not None
    assert "victim" not in {one.node for one in document.nodes}


async def test_the_brake_keeps_health_from_excluding(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    """What health would exclude is only recorded (A15.4)."""
    async with working(nats, tmp_path):
        await ask(own, "control", SetControl, changes={"brake": "on", "modes.exclude": "enforce"})
        await fail_for_long(own, "n1")
        (observed,) = await said(own, NodeExcluded)
        assert observed.mode == "observe"
        done = await ask(own, "exclude", ExcludeNode, node="n2")
        assert "exclusions are only observed now" in done.text
        # Two replicas of one question: the second one looks again.
        names = [f"m{number}" for number in range(20)]
        await asyncio.gather(*(ask(own, "exclude", ExcludeNode, node=name) for name in names))
        await excluded(own, "n2", *names)


async def test_what_a_newer_release_has_written_about_nodes_is_left_alone(
    own: NatsBus, nats: DevServer, tmp_path: Path
) -> None:
    """An older health service does not write over it (A15.3)."""
    strange = b'{"type":"nodes_document.v2"}'
    await own.documents("NODES").put(CLUSTER, strange, revision=0)
    async with working(nats, tmp_path) as health:
        with pytest.raises(AskRefusedError, match="health cannot read the document of nodes"):
            await nodes(own)
        assert health.statistics()["judging"] == 0
        await ask(own, "exclude", ExcludeNode, node="n1")  # people need no register
        await excluded(own, "n1")
    assert (await own.documents("NODES").get(CLUSTER)).data == strange
