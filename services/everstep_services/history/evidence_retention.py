"""How long the bus keeps the contents of evidence, as its server says."""

import asyncio
import logging

from everstep.bus.errors import BusError
from everstep.bus.ports import Blobs
from everstep.clock import Clock

log = logging.getLogger(__name__)

_ASK_EVERY_S = 60.0
_WITHIN_S = 1.0


class EvidenceRetention:
    """Asks once a minute at most, and remembers the answer while the bus is away."""

    def __init__(self, blobs: Blobs, clock: Clock) -> None:
        self._blobs = blobs
        self._clock = clock
        self._asked_at: float | None = None
        self._keeps_s: float | None = None

    async def keeps_s(self) -> float | None:
        """None for ever, and where no server has been asked yet."""
        now = self._clock.now()
        if self._asked_at is None or now - self._asked_at >= _ASK_EVERY_S:
            try:
                async with asyncio.timeout(_WITHIN_S):
                    self._keeps_s = await self._blobs.keeps_s()
            except (BusError, TimeoutError) as error:
                log.debug("retention_not_known error=%s", error)
            self._asked_at = now
        return self._keeps_s
