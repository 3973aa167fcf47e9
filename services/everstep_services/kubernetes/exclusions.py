"""Exclusions and drains of Everstep: read from its documents, and asked of its services."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.messages import (
    ControlDocument,
    Done,
    DrainNode,
    ExcludeNode,
    Exclusion,
    IncludeNode,
    NodeStanding,
    NodeStandings,
    RoundDocument,
    ShowNodes,
)
from everstep.messages.codec import decode_as
from everstep.subjects import CLUSTER

BY = "kubernetes"
"""Who asks, in facts about nodes."""
_WITHIN_S = 12.0
_OVER = frozenset({"done", "stopped"})


@dataclass(frozen=True, slots=True)
class ExclusionList:
    """The exclusions at one moment."""

    by_node: Mapping[str, Exclusion]
    binds: bool = True
    """Excluded nodes may not join; otherwise exclusions are only observed."""
    is_braked: bool = False
    """A person has pulled the brake: everything only observes."""


class Exclusions:
    """The exclusions of nodes as the services see them."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def read(self) -> ExclusionList:
        """The exclusions whose time is not over, and whether they bind."""
        document = await self._bus.documents("CONTROL").get(CLUSTER)
        if document.data is None:
            return ExclusionList({})
        control = decode_as(document.data, ControlDocument)
        now = self._clock.wall()
        in_time = {
            each.node: each for each in control.exclusions if each.until is None or each.until > now
        }
        binds = control.modes.get("exclude") != "observe"
        return ExclusionList(in_time, binds=binds, is_braked=control.is_braked)

    async def standings(self, nodes: tuple[str, ...]) -> dict[str, NodeStanding]:
        """What health knows about these nodes."""
        if not nodes:
            return {}
        question = ShowNodes(job=CLUSTER, nodes=nodes)
        answer = await self._bus.ask(
            "health", "nodes", question, NodeStandings, job=CLUSTER, within_s=_WITHIN_S
        )
        return {standing.node: standing for standing in answer.nodes}

    async def exclude(self, node: str, reason: str, ttl_s: float) -> str:
        """Keep a node out of rounds; returns health's answer."""
        question = ExcludeNode(job=CLUSTER, node=node, by=BY, reason=reason, ttl_s=ttl_s, origin=BY)
        return await self._ask("health", "exclude", question)

    async def include(self, node: str, reason: str) -> str:
        """Let a node join again; returns health's answer."""
        question = IncludeNode(job=CLUSTER, node=node, by=BY, reason=reason, origin=BY)
        return await self._ask("health", "include", question)

    async def drain(self, job: str, node: str, reason: str, within_s: float) -> str:
        """Let a node leave a job after a save; returns rendezvous' answer."""
        question = DrainNode(job=job, node=node, by=BY, reason=reason, within_s=within_s, origin=BY)
        return await self._ask("rendezvous", "drain", question)

    async def jobs_on(self, nodes: frozenset[str]) -> dict[str, list[str]]:
        """The jobs that these nodes take part in, by node."""
        rounds, jobs = self._bus.documents("ROUNDS"), dict[str, list[str]]()
        for key in await rounds.keys():
            stored = await rounds.get(key)
            if stored.data is None:
                continue
            try:
                document = decode_as(stored.data, RoundDocument)
            except EverstepError:  # of a newer release: its own services report it
                continue
            if document.phase in _OVER:
                continue
            for seat in document.seats:
                if seat.node in nodes and seat.stage != "gone":
                    jobs.setdefault(seat.node, []).append(document.job)
            await asyncio.sleep(0)
        return jobs

    async def _ask(
        self, service: str, verb: str, question: DrainNode | ExcludeNode | IncludeNode
    ) -> str:
        done = await self._bus.ask(
            service, verb, question, Done, job=question.job, within_s=_WITHIN_S
        )
        return f"refused: {done.text}" if done.is_refused else done.text


def is_due(exclusion: Exclusion | None, clock: Clock, ttl_s: float) -> bool:
    """Whether a node must be excluded, or its exclusion by us be renewed."""
    if exclusion is None:
        return True
    if exclusion.by != BY or exclusion.until is None:
        return False
    return exclusion.until - clock.wall() < timedelta(seconds=ttl_s / 2)
