"""Time as a port: domains take `now`, shells take a `Clock`."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Compare readings from one process only, never across hosts."""

    def now(self) -> float: ...

    def wall(self) -> datetime:
        """The time of day, in UTC: shown to people, never compared."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
