"""Reports when the first collective of a round began, where nobody counts steps."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.clock import Clock
from everstep.messages import StartRanks
from everstep_services.agent.core.actions import Action, SendReport
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.stalls.collectives import GONE, read_first_entered

_FIRST_S, _MOST_S = 0.5, 16.0


@dataclass(eq=False, repr=False)
class FirstCollective:
    """Asks the flight recorder of slot 0's first rank after a restart, ever less often.

    An incident lasts until a first step. Where the script shows none, it lasts until the first
    collective begins: nobody else knows when such a training was back.
    """

    _agent: Agent
    _watched: Callable[[int], WatchedRank | None]
    _clock: Clock
    _do: Callable[[Sequence[Action]], None]

    def __post_init__(self) -> None:
        self._begun = asyncio.Event()

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are about to be started."""
        if order.slot == 0 and order.restarts:
            self._begun.set()

    async def look_for_ever(self) -> None:
        """Look in each round that follows another."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            if (order := self._agent.order) is not None:
                await self._look(order)

    async def _look(self, order: StartRanks) -> None:
        wait_s = _FIRST_S
        while True:
            await self._clock.sleep(wait_s)
            if self._agent.order != order or not self._agent.live_ranks:
                return
            watched = self._watched(order.first_rank)
            page = None if watched is None else watched.reading()
            if watched is not None and page is not None:
                if page.steps:
                    return
                at_s = await read_first_entered(watched.folder)
                if at_s is not None:
                    lasted_s = self._clock.now() - page.script_s
                    self._report(order, at_s, lasted_s)
                    return
            wait_s = min(2 * wait_s, _MOST_S)

    def _report(self, order: StartRanks, at_s: float, lasted_s: float) -> None:
        if at_s == GONE or self._agent.order != order:
            return
        # the wall clock may have been set meanwhile
        ago_s = min(max(0.0, self._clock.wall().timestamp() - at_s), lasted_s)
        reason = f"rank {order.first_rank} has begun its first collective"
        told = SendReport(
            order.round, "first_collective", reason, order.first_rank, last_progress_age_s=ago_s
        )
        self._do([told])
