"""Ids that every replica derives from the same parts, and no job can derive (ADR-0083).

A job can send the id of a message itself, and the first message with an id counts. So an id that
others could compute would let them suppress a fact of a service before it is recorded.
"""

import asyncio
import logging
import secrets

from everstep.bus.errors import BusError, BusUnreachableError, ConflictError
from everstep.bus.ports import Bus
from everstep.bus.topology import LEASES
from everstep.clock import Clock
from everstep.ids import id_from

log = logging.getLogger(__name__)

_KEY = "key_of_ids"
_KEY_BYTES = 32
_AGAIN_AFTER_S = 1.0
_COMPARE_EVERY_S = 60.0


class DerivedIds:
    """Has the key that all services share; the first of them makes it."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._key = b""
        self._is_known = asyncio.Event()

    async def known(self) -> None:
        """Wait until the key has been read or made."""
        await self._is_known.wait()

    def of(self, *parts: str) -> str:
        """The id of these parts; `BusUnreachableError` while the key is not known."""
        if not self._key:
            raise BusUnreachableError("the key of ids has not been read from the bus yet")
        return id_from(*parts, key=self._key)

    async def keep_for_ever(self) -> None:
        """Read or make the key; store it again if the bus has lost it."""
        while True:
            await self._bus.wait_connected()
            try:
                self._key = await self._stored()
                self._is_known.set()
                wait_s = _COMPARE_EVERY_S
            except (BusError, TimeoutError) as error:
                log.info("key_of_ids_not_read error=%s", error)
                wait_s = _AGAIN_AFTER_S
            await self._clock.sleep(wait_s)

    async def _stored(self) -> bytes:
        documents = self._bus.documents(LEASES)  # on every bus, and agents cannot read it
        document = await documents.get(_KEY)
        if document.data is not None and len(document.data) == _KEY_BYTES:
            return document.data
        key = self._key or secrets.token_bytes(_KEY_BYTES)
        try:
            await documents.put(_KEY, key, revision=document.revision)
        except ConflictError:  # another service was first
            return await self._stored()
        return key
