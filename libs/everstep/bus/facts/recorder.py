"""Writes facts to this disk. While it is full, the newest of them wait in memory."""

import asyncio
import logging
from collections import deque

from everstep.bus.errors import SpoolError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import Fact

log = logging.getLogger(__name__)

_RECORDED_AT_ONCE = 500
_WAITING_MOST = 100_000
_RETRY_S = 1.0


class Recorder:
    """Records the facts of its owner in the background; never blocks and never fails."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._waiting: deque[Fact] = deque(maxlen=_WAITING_MOST)
        self._in_hand: list[Fact] = []
        self._has_facts = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._trouble = ""

    @property
    def waiting(self) -> int:
        """The number of facts that are not on this disk yet."""
        return len(self._waiting) + len(self._in_hand)

    def keep(self, *facts: Fact) -> None:
        """Record them as soon as that is possible."""
        if facts:
            self._waiting.extend(facts)
            self._is_empty.clear()
            self._has_facts.set()

    async def all_kept(self) -> None:
        """Wait until none waits."""
        await self._is_empty.wait()

    async def record_for_ever(self) -> None:
        """Record waiting facts, and try again until they are on the disk."""
        while True:
            if not self._waiting and not self._in_hand:
                self._has_facts.clear()
                self._is_empty.set()
                await self._has_facts.wait()
            while self._waiting and len(self._in_hand) < _RECORDED_AT_ONCE:
                self._in_hand.append(self._waiting.popleft())
            self._in_hand = await self._record(self._in_hand)
            if self._in_hand:
                await self._clock.sleep(_RETRY_S)

    async def _record(self, facts: list[Fact]) -> list[Fact]:
        """Return the facts to try again; recording a fact twice is harmless."""
        outcomes = await asyncio.gather(
            *(self._bus.record(fact) for fact in facts), return_exceptions=True
        )
        left = list[Fact]()
        trouble = ""
        for fact, outcome in zip(facts, outcomes, strict=True):
            if isinstance(outcome, SpoolError):
                left.append(fact)
                trouble = str(outcome)
            elif isinstance(
                outcome, Exception
            ):  # too large, for example: another attempt would fail, too
                log.error("fact_lost fact=%r error=%s", fact, outcome)
        if trouble != self._trouble:
            self._trouble = trouble
            log.error("facts_wait count=%d error=%s", self.waiting, trouble or "none any more")
        return left
