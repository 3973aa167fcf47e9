"""Copies the ends of logs into the database, before the stream of evidence forgets them."""

import asyncio
import logging
from collections.abc import Callable

from everstep.bus.errors import BlobMissingError, BusError
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Blobs
from everstep.clock import Clock
from everstep.messages import BlobRef
from everstep.store.errors import StoreError
from everstep.store.evidence_copies import EvidenceCopies
from everstep.store.times import to_us
from everstep.subjects import BadSubjectError
from everstep_services.history.notifier import LogNotifier

log = logging.getLogger(__name__)

_AT_ONCE = 100
_LOOK_EVERY_S = 5.0
_FETCH_WITHIN_S = 10.0


class LogCopier:
    """Copies what facts refer to, in the replica that projects them.

    If two replicas do it for a moment, they write the same.
    """

    def __init__(
        self,
        kept: EvidenceCopies,
        blobs: Blobs,
        notifier: LogNotifier,
        *,
        clock: Clock,
        most_bytes: int,
    ) -> None:
        self._copies = kept
        self._blobs = blobs
        self._notifier = notifier
        self._clock = clock
        self._most_bytes = most_bytes
        self._n = 0
        self._is_failing = False
        self._input_failures = InputFailures("copies of logs")

    async def copy_for_ever(self, *, is_mine: Callable[[], bool]) -> None:
        """Copy whenever the log has grown; a copy that fails is tried again."""
        while True:
            seen = self._notifier.last_n
            is_wanted = self._most_bytes and is_mine() and not self._notifier.is_closed
            if is_wanted and await self._copied():
                await self._notifier.wait_beyond(seen, _LOOK_EVERY_S)
            else:
                await self._clock.sleep(_LOOK_EVERY_S)

    async def copy_all(self) -> int:
        """Copy each blob that a fact refers to and that was not tried yet; how many were tried."""
        tried = 0
        while True:
            wanted = await self._copies.wanted(self._n, most=_AT_ONCE)
            for ref in wanted.refs:
                await self._copy(ref)
            tried += len(wanted.refs)
            if wanted.end_n == self._n:
                break
            self._n = wanted.end_n
        if tried:
            absent = "it was the oldest when history.keep_log_bytes was reached"
            await self._copies.make_room(self._most_bytes, absent=absent)
        return tried

    async def _copy(self, ref: BlobRef) -> None:
        data, absent = None, None
        try:
            async with asyncio.timeout(_FETCH_WITHIN_S):
                data = await self._blobs.get(ref)
        except (BlobMissingError, BadSubjectError) as error:
            absent = str(error)
        now_us = to_us(self._clock.wall())
        await self._copies.keep(ref, data, absent=absent, now_us=now_us)

    async def _copied(self) -> bool:
        """Whether all copies could be made; False when it must be tried again."""
        try:
            await self.copy_all()
        except (BusError, StoreError, TimeoutError) as error:
            if not self._is_failing:
                log.warning("logs_not_copied error=%s", str(error) or type(error).__name__)
            self._is_failing = True
            return False
        except Exception as error:  # noqa: BLE001  what facts refer to is not ours to trust
            self._input_failures.note("a reference to a log", error)
            return False
        self._is_failing = False
        return True
