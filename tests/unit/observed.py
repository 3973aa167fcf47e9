"""A clock that a test moves, and checks that end in each way a check can."""

import asyncio
from datetime import UTC, datetime

from everstep.errors import EverstepError
from everstep.observe.health import Check, Health
from tests.waiting import turns


class HandClock:
    """A clock that a test moves; sleeping takes longer by the set delay."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.time = 100.0
        self.late_s = late_s
        self.third_sleep = asyncio.Event()
        self._sleeps = 0

    def now(self) -> float:
        return self.time

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    async def sleep(self, seconds: float) -> None:
        self._sleeps += 1
        if self._sleeps == 3:
            self.third_sleep.set()
        self.time += seconds + self.late_s
        await turns()


async def fine() -> None:
    return


async def broken() -> None:
    raise EverstepError("no server at\nnats://u:hunter22@h:1")


async def buggy() -> None:
    raise KeyError("/var/lib/private")


async def hanging() -> None:
    await asyncio.Event().wait()


def health_of(clock: HandClock, within_s: float = 2.0, **checks: Check) -> Health:
    return Health("history", "1.2.3", checks, clock, within_s=within_s)
