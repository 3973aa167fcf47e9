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
from everstep_services.agent.stalls.position import ActivitySigns
from everstep_services.agent.stalls.process_state import PROC

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
        known = self._known.get(rank)
        return ActivitySigns() if known is None else known.signs

    def looked_s(self, rank: int) -> float:
        """When these signs were seen."""
        known = self._known.get(rank)
        return -inf if known is None else known.looked_at_s

    def entered(self, rank: int) -> int | None:
        """The number of collectives that it had entered at the last sample."""
        known = self._known.get(rank)
        return None if known is None else known.entered

    def collective(self, rank: int, since_s: float) -> str | None:
        """The collective that it is in; None without a sample after this instant."""
        known = self._known.get(rank)
        is_lately = known is not None and known.looked_at_s > since_s
        return known.signs.collective if known is not None and is_lately else None

    async def look(
        self, silent: Mapping[int, WatchedRank], compiling: Mapping[int, Compiling] = _NONE
    ) -> None:
        """Sample whether these ranks work, and whether those that compile compute."""
        round_ = self._known
        await asyncio.to_thread(self._compilers.look, compiling)
        pids = {rank: known.pid for rank, known in silent.items() if known.pid}
        idle_s = await asyncio.to_thread(self._idleness.look, pids)
        for rank, watched in silent.items():
            known, began_s = round_.setdefault(rank, _Known()), self._clock.now()
            found = await read_collectives(watched.folder)
            if found is not None and found.entered_at_s is None and found.entered == known.entered:
                # It seems to stand, and its recorder lists nothing that goes on.
                found = await read_collectives(watched.folder, is_whole=True) or found
            await asyncio.to_thread(self._idleness.overlook, rank)  # its answers were work
            known.signs = self._signs(known, idle_s.get(rank), found)
            known.looked_at_s = began_s
        await asyncio.to_thread(self._compilers.overlook)

    def _signs(
        self, known: _Known, idle_s: float | None, found: CollectiveState | None
    ) -> ActivitySigns:
        if found is None:
            return ActivitySigns(idle_s, known.signs.collective_s)
        if known.entered is None or found.entered > known.entered:
            known.entered = found.entered
            known.moved_between = known.looked_at_s, self._clock.now()
        collective_s = known.signs.collective_s
        if known.moved_between is not None:
            collective_s = self._entered_s(known.moved_between, found)
            if found.entered_at_s is not None:
                known.moved_between = None
        return ActivitySigns(
            idle_s,
            collective_s,
            found.waits_in,
            is_recorded=True,
            of_all=found.of_all,
            awaits=found.awaits,
        )

    def _entered_s(self, between: tuple[float, float], found: CollectiveState) -> float | None:
        """When it entered the last collective; never too early, as far as is known."""
        after_s, before_s = between
        if found.entered_at_s is None:
            return before_s if after_s > -inf else None
        # The wall clock may have been set meanwhile: it only places the instant between the two.
        ago_s = self._clock.wall().timestamp() - found.entered_at_s
        return min(before_s, max(after_s, self._clock.now() - ago_s))
