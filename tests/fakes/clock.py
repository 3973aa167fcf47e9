"""Time that moves only when the test moves it, and time that a test can watch."""

import asyncio
import heapq
import itertools
import math
from datetime import UTC, datetime, timedelta

from everstep.clock import SystemClock
from tests.waiting import turns


class FakeClock:
    def __init__(self, start: float = 1_000.0) -> None:
        self._now = start
        self._start = start
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._now - self._start)

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        """Move time forward; each sleeper wakes in order and sees its own deadline."""
        end = self._now + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, woken = heapq.heappop(self._sleepers)
            woken.set()
            await _settle()
        self._now = end


class StoppedClock(SystemClock):
    """The system's, on which no time passes: nothing that a test has told grows old."""

    def __init__(self) -> None:
        self._began = super().now()

    def now(self) -> float:
        return self._began


class NotedClock(SystemClock):
    """The system's, with its waits noted; `most_s` cuts each of them short."""

    def __init__(self, most_s: float = math.inf) -> None:
        self.waits: list[float] = []
        self._most_s = most_s

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await super().sleep(min(seconds, self._most_s))


class LeapingClock(SystemClock):
    """The system's, which a test can put forward; sleeps last as long as before."""

    def __init__(self) -> None:
        self._leapt_s = 0.0

    def now(self) -> float:
        return super().now() + self._leapt_s

    def leap(self, seconds: float) -> None:
        self._leapt_s += seconds


async def _settle() -> None:
    """Let every task run until it waits for something else than its turn."""
    await turns(20)
