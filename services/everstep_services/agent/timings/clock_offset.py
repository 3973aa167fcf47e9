"""The offset of this node's clock from those of the service that compares the ranks."""

from collections.abc import Callable
from math import inf

from everstep.bus.errors import AskTimeoutError, BusError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import ClockOffset, ClockReading, ReadClock

QUESTIONS = 4
_WITHIN_S = 0.5
_AGAIN_AFTER_S = 30.0
"""After no answer, the service is left alone for this long."""


class ClockOffsets:
    """Asks any replica that answers. Without an answer there are no offsets."""

    def __init__(self, job: str, bus: Bus, clock: Clock, wall: Callable[[], float]) -> None:
        self._job = job
        self._bus = bus
        self._clock = clock
        self._wall = wall
        self._silent_until_s = -inf

    async def offsets(self) -> tuple[ClockOffset, ...]:
        """Of each replica that answered, the fastest answer."""
        best: dict[str, ClockOffset] = {}
        if self._clock.now() < self._silent_until_s or not self._bus.connected:
            return ()
        for _ in range(QUESTIONS):
            try:
                offset = await self._asked()
            except AskTimeoutError:
                break  # the service is busy; it may answer at the end of the next window
            except BusError:
                self._silent_until_s = self._clock.now() + _AGAIN_AFTER_S
                break
            fastest = best.get(offset.clock)
            if fastest is None or offset.error_s < fastest.error_s:
                best[offset.clock] = offset
        return tuple(best.values())

    async def _asked(self) -> ClockOffset:
        question, began = ReadClock(job=self._job), self._clock.now()
        reading = await self._bus.ask(
            "straggler", "clock", question, ClockReading, job=self._job, within_s=_WITHIN_S
        )
        half_s = max(0.0, self._clock.now() - began) / 2
        return ClockOffset(
            clock=reading.clock,
            offset_s=round(self._wall() - half_s - reading.at_s, 7),
            error_s=round(half_s, 7),
        )
