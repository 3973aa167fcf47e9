"""A job's own login gets no node of another job accused, whatever it puts on record (A8, A11.1)."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from everstep import ids
from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import (
    CheckResult,
    EvidenceCollected,
    IncidentOpened,
    Member,
    NodeCheckFinished,
    RankExited,
    RoundFormed,
    VerdictReached,
    encode,
)
from tests.integration.attribution.replicas import Training, at_work, verdicts
from tests.unit.rendezvous.documents import seated

KERNEL = b"[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=71, GPU has fallen off the bus.\n"


@pytest.fixture
async def bus(shared_nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    settings = shared_nats.settings(SERVICE)
    async with connect(settings, "attribution", spool=tmp_path / "spool") as bus:
        yield bus


class Liar:
    """Has the login of a job's agents, and says whatever that lets it say."""

    def __init__(self, bus: NatsBus, job: str) -> None:
        self._bus = bus
        self._job = job
        self.incident = ids.new_id()

    def about(self, **more: Any) -> dict[str, Any]:
        return {
            "id": ids.new_id(), "job": self._job, "at": datetime.now(UTC), "source": "agent/x",
            "round": 1, **more,
        }  # fmt: skip

    async def accuse(self, node: str) -> None:
        """It is in the round; its kernel, a check and its ranks say that it is broken."""
        members = (Member(slot=0, node=node, first_rank=0, ranks=2),)
        await self._bus.record(
            RoundFormed(**self.about(), members=members, world_size=2, waited_s=0.0, allocation="a")
        )
        broken = CheckResult(check="gpu", state="failed", failure_class="replace", reason="Xid 79")
        await self._bus.record(
            NodeCheckFinished(
                **self.about(), node=node, occasion="periodic", is_healthy=False, took_s=1.0,
                results=(broken,), checks=("gpu",),
            )
        )  # fmt: skip
        for rank in (0, 1):
            await self._bus.record(
                RankExited(
                    **self.about(), node=node, slot=0, rank=rank, local_rank=rank, pid=7,
                    lasted_s=1.0, how="out_of_memory", exit_code=None, signal="SIGKILL",
                )
            )  # fmt: skip
        await self._bus.record(
            EvidenceCollected(
                **self.about(), incident=self.incident, node=node, evidence="kernel_log",
                blob=await self._bus.blobs.put(self._job, KERNEL), summary="the kernel's log",
            )
        )  # fmt: skip
        await self._bus.record(
            IncidentOpened(
                **self.about(), incident=self.incident, trigger="node_lost", reason="it is gone",
                node=node,
            )
        )  # fmt: skip
        await self._bus.flush(40)


def named(found: list[VerdictReached]) -> set[str]:
    """Every node that verdicts accuse, or hold for possible."""
    others = (node for one in found for other in one.alternatives for node in other.nodes)
    return {*(node for one in found for node in one.culprit_nodes), *others}


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_jobs_login_gets_no_node_of_another_job_accused(
    shared_nats: DevServer, bus: NatsBus, job: str, tmp_path: Path, is_known: bool
) -> None:
    """Neither in a job with nodes of its own, nor in one that rendezvous does not know."""
    if is_known:
        document = encode(seated(job, ["n0"], ranks=2))
        await bus.documents("ROUNDS").put(job, document, revision=0)
    other, victim = Training(bus, f"{job}-other"), f"n0-of-{job}"
    other.names = (victim, f"n1-of-{job}")
    login = await shared_nats.grant(job)
    async with connect(login, "liar", spool=tmp_path / "liar") as theirs, at_work(bus) as replica:
        liar = Liar(theirs, job)
        await liar.accuse(victim)
        assert named(await verdicts(bus, job)) == set()
        if is_known:
            assert replica.statistics()["left_out_total"] > 0
        # The other job has an incident of its own: what is remembered of its nodes is not forged.
        await other.form()
        await other.open()
        await other.leave("kernel_log", KERNEL)
        await other.stop()
        (honest,) = await verdicts(bus, other.job)
    assert (honest.cause, honest.culprit_nodes) == ("gpu", (other.names[1],))
    assert victim not in honest.reason
    assert named([honest]) == {other.names[1]}
