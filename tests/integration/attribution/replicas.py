"""Replicas of attribution at work, and incidents for them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from everstep import ids
from everstep.bus.client import NatsBus
from everstep.bus.ports import Bus
from everstep.clock import SystemClock
from everstep.incident_outcomes import IncidentOutcome
from everstep.messages import (
    ErrorRecord,
    EvidenceCollected,
    IncidentClosed,
    IncidentOpened,
    Ledger,
    Member,
    RankExited,
    RanksStopped,
    RoundFormed,
    VerdictReached,
    encode,
)
from everstep.runtime import Loop
from everstep_services.attribution.analyzers.runner import BUILT_IN
from everstep_services.attribution.domain import weights
from everstep_services.attribution.incident import Analyzer
from everstep_services.attribution.log_analysis import rules
from everstep_services.attribution.replica import AttributionReplica
from everstep_services.attribution.settings import AttributionSettings
from tests.integration.health.replicas import facts_of
from tests.unit.rendezvous.documents import seated

QUICK = AttributionSettings(
    quiet_s=0.1, again_after_s=0.1, first_within_s=60.0, analyzer_within_s=60.0
)
"""Cases are judged once they are complete; a test that wants a deadline sets one."""
PEER = "Connection closed by peer [10.0.0.3]:4711"


@asynccontextmanager
async def at_work(
    bus: Bus, settings: AttributionSettings = QUICK, analyzers: Mapping[str, Analyzer] = BUILT_IN
) -> AsyncIterator[AttributionReplica]:
    """One replica, all of its loops running, its questions heard."""
    await asyncio.to_thread(rules.shipped)
    await asyncio.to_thread(weights.shipped)
    replica = AttributionReplica(settings, analyzers, bus, SystemClock())
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(_run(loop)) for loop in replica.loops]
        try:
            await replica.answers.open.wait()
            yield replica
        finally:
            for loop in loops:
                loop.cancel()


async def _run(loop: Loop) -> None:
    await loop()


class Training:
    """Says what agents and rendezvous say about one job."""

    def __init__(self, bus: Bus, job: str, nodes: int = 2, ranks: int = 2) -> None:
        self.bus = bus
        self.job = job
        self.names = tuple(f"n{number}" for number in range(nodes))
        self.ranks = ranks
        self.round = 1
        self.incident = ids.new_id()

    def about(self, **more: Any) -> dict[str, Any]:
        """What every fact says."""
        return {
            "id": ids.new_id(),
            "job": self.job,
            "at": datetime.now(UTC),
            "source": "agent/n0",
            "round": self.round,
            **more,
        }

    async def form(self) -> None:
        """Rendezvous writes the round down, and puts it on record."""
        document = seated(self.job, self.names, ranks=self.ranks, round_=self.round)
        await self.bus.documents("ROUNDS").put(self.job, encode(document), revision=None)
        members = tuple(
            Member(slot=slot, node=name, first_rank=slot * self.ranks, ranks=self.ranks)
            for slot, name in enumerate(self.names)
        )
        await self.bus.record(
            RoundFormed(
                **self.about(),
                members=members,
                world_size=document.world_size,
                waited_s=0.1,
                allocation="a",
            )
        )

    async def exit(self, rank: int, name: str = "", text: str = "", **more: Any) -> None:
        """A rank ends with an exception, or with a code."""
        node = rank // self.ranks
        error = ErrorRecord(name=name, text=text, place="train.py:8 in step") if name else None
        given = {"how": "error", "exit_code": 1, "error": error, **more}
        await self.bus.record(
            RankExited(
                **self.about(),
                node=self.names[node],
                slot=node,
                rank=rank,
                local_rank=rank % self.ranks,
                pid=4711,
                lasted_s=1.0,
                **given,
            )
        )

    async def open(self, trigger: str = "rank_exited", **more: Any) -> None:
        self.incident = ids.new_id()
        await self.bus.record(
            IncidentOpened(
                **self.about(),
                incident=self.incident,
                trigger=trigger,
                reason="rank 3 exited with 1",
                **more,
            )
        )

    async def close(self, outcome: IncidentOutcome = "recovered") -> None:
        """It trains again, or another incident takes this one over."""
        await self.bus.record(
            IncidentClosed(
                **self.about(), incident=self.incident, outcome=outcome, reason="it is back",
                ledger=Ledger(),
            )
        )  # fmt: skip

    async def stop(self, *nodes: int) -> None:
        """Nodes have stopped their ranks; all of them, if none is named."""
        for node in nodes or range(len(self.names)):
            await self.bus.record(
                RanksStopped(**self.about(), node=self.names[node], slot=node, ranks=(), stop_s=0.1)
            )

    async def leave(self, kind: str, content: bytes, rank: int | None = None) -> None:
        """Evidence is collected and kept."""
        blob = await self.bus.blobs.put(self.job, content)
        await self.bus.record(
            EvidenceCollected(
                **self.about(), incident=self.incident, node=self.names[1], evidence=kind,
                rank=rank, blob=blob, summary="stderr: the end of it",
            )
        )  # fmt: skip

    async def fail(self, text: str = "batch 17 has no labels") -> None:
        """Rank 3 raises, the others lose it, all are stopped."""
        await self.form()
        for rank in (0, 1, 2):
            await self.exit(rank, "RuntimeError", PEER)
        await self.exit(3, "ValueError", text)
        await self.open()
        await self.stop()


async def verdicts(bus: NatsBus, job: str, count: int = 1) -> list[VerdictReached]:
    """All verdicts of a job, once there are `count`."""
    return await facts_of(bus, VerdictReached, count, job)
