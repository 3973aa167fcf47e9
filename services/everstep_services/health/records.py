"""Brings facts onto our disk. While it is full they wait, the newest of them."""

import asyncio
import logging
from collections import deque
from itertools import islice

from everstep.bus.errors import SpoolError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import Fact

log = logging.getLogger(__name__)

_RECORDED_AT_ONCE = 500
_WAITING_MOST = 100_000
_RETRY_S = 1.0


class Records:
    """What this replica has found and decided."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._waiting: deque[Fact] = deque(maxlen=_WAITING_MOST)
        self._has_facts = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Facts that are not on our own disk yet."""
        return len(self._waiting)

    def keep(self, *facts: Fact) -> None:
        """Record them as soon as that is possible."""
        self._waiting.extend(facts)
        self._has_facts.set()

    async def record_for_ever(self) -> None:
        """Record whatever waits, again and again until it is kept."""
        while True:
            if not self._waiting:
                self._has_facts.clear()
                await self._has_facts.wait()
            batch = list(islice(self._waiting, _RECORDED_AT_ONCE))
            trouble = await self._record(batch)
            if trouble is not None:
                log.error("findings_wait count=%d error=%s", len(self._waiting), trouble)
                await self._clock.sleep(_RETRY_S)
                continue
            for _ in batch:
                self._waiting.popleft()

    async def _record(self, facts: list[Fact]) -> BaseException | None:
        """All or none: a fact that is recorded again is the same fact."""
        trouble: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for fact in facts:
                    tasks.create_task(self._bus.record(fact))
        except* SpoolError as errors:
            trouble = errors.exceptions[0]
        return trouble
