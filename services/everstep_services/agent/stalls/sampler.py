"""Samples ranks whose pages are silent: whether they are busy, and their collectives."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import MappingProxyType

from everstep.clock import Clock
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.stalls.collectives import CollectiveState, read_collectives
from everstep_services.agent.stalls.compilers import Compilers, Compiling
from everstep_services.agent.stalls.idleness import Idleness
from everstep_services.agent.stalls.limits import StallLimits
from everstep_services.agent.stalls.process_state import PROC
from everstep_services.agent.stalls.rank_view import ActivitySigns

_EVERY_S = 5.0
_SILENT_S = 30.0
_NONE: Mapping[int, Compiling] = MappingProxyType({})


def look_every_s(limits: StallLimits) -> float:
    """Often enough that progress of a rank is seen before it is late."""
    return max(0.1, min(_EVERY_S, limits.shortest_s() / 8))


def silent_after_s(limits: StallLimits) -> float:
    """Only ranks whose page has been silent for this long are sampled."""
    return min(_SILENT_S, limits.shortest_s() / 4)


@dataclass(slots=True)
class _Known:
    """The samples of one rank."""

    looked_at_s: float = -inf
    signs: ActivitySigns = field(default_factory=ActivitySigns)
    entered: int | None = None
    moved_between: tuple[float, float] | None = None
    """It has entered its last collective between these two instants."""


class RankSampler:
    """Samples the ranks of one round through the kernel and torch's own threads."""

    def __init__(self, clock: Clock, proc: Path = PROC) -> None:
        self._clock = clock
        self._idleness = Idleness(clock)
        self._compilers = Compilers(clock, proc)
        self._known: dict[int, _Known] = {}

    def begins(self) -> None:
        """A new round: answers still on their way belong to the round before."""
        self._known = {}
        self._compilers.begins()

    def compile_idle_s(self, rank: int) -> float:
        """For how long its compilation has computed next to nothing."""
        return self._compilers.idle_s(rank)

    def signs(self, rank: int) -> ActivitySigns:
        """The signs of work of a rank."""
        samples = self._known.get(rank)
        return ActivitySigns() if samples is None else samples.signs

    def looked_s(self, rank: int) -> float:
        """When these signs were seen."""
        samples = self._known.get(rank)
        return -inf if samples is None else samples.looked_at_s

    def entered(self, rank: int) -> int | None:
        """The number of collectives that it had entered at the last sample."""
        samples = self._known.get(rank)
        return None if samples is None else samples.entered

    def collective(self, rank: int, since_s: float) -> str | None:
        """The collective that it is in; None without a sample after this instant."""
        samples = self._known.get(rank)
        is_lately = samples is not None and samples.looked_at_s > since_s
        return samples.signs.collective if samples is not None and is_lately else None

    async def look(
        self, silent: Mapping[int, WatchedRank], compiling: Mapping[int, Compiling] = _NONE
    ) -> None:
        """Sample whether these ranks work, and whether those that compile compute."""
        round_ = self._known
        await asyncio.to_thread(self._compilers.look, compiling)
        pids = {rank: samples.pid for rank, samples in silent.items() if samples.pid}
        idle_s = await asyncio.to_thread(self._idleness.look, pids)
        for rank, watched in silent.items():
            samples, began_s = round_.setdefault(rank, _Known()), self._clock.now()
            collectives = await read_collectives(watched.folder)
            if collectives is not None and (
                collectives.is_unclear
                or (
                    collectives.entered_at_s is None
                    and collectives.entered <= (samples.entered or -1)
                )
            ):
                # It seems to stand, and a recorder lists nothing that goes on.
                collectives = await read_collectives(watched.folder, is_whole=True) or collectives
            await asyncio.to_thread(self._idleness.overlook, rank)  # its answers were work
            samples.signs = self._signs(samples, idle_s.get(rank), collectives)
            samples.looked_at_s = began_s
        await asyncio.to_thread(self._compilers.overlook)

    def _signs(
        self, samples: _Known, idle_s: float | None, collectives: CollectiveState | None
    ) -> ActivitySigns:
        if collectives is None:
            return ActivitySigns(idle_s, samples.signs.collective_s)
        if samples.entered is None or collectives.entered > samples.entered:
            samples.entered = collectives.entered
            samples.moved_between = samples.looked_at_s, self._clock.now()
        collective_s = samples.signs.collective_s
        if samples.moved_between is not None:
            collective_s = self._entered_s(samples.moved_between, collectives)
            if collectives.entered_at_s is not None:
                samples.moved_between = None
        return ActivitySigns(
            idle_s,
            collective_s,
            collectives.waits_in,
            is_recorded=True,
            entered_in=collectives.entered_in,
            awaits=collectives.awaits,
        )

    def _entered_s(
        self, between: tuple[float, float], collectives: CollectiveState
    ) -> float | None:
        """When it entered the last collective; never too early, as far as is known."""
        after_s, before_s = between
        if collectives.entered_at_s is None:
            return before_s if after_s > -inf else None
        # The wall clock may have been set meanwhile: it only places the instant between the two.
        ago_s = self._clock.wall().timestamp() - collectives.entered_at_s
        return min(before_s, max(after_s, self._clock.now() - ago_s))
