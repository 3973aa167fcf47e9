"""The projector: takes facts from the stream into the database, whatever happens to either."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from everstep.backoff import backoff_s
from everstep.bus.errors import BusError, LeaseLostError
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus, Delivered, Held, StreamPosition
from everstep.clock import Clock
from everstep.store.database import Database
from everstep.store.errors import SchemaTooNewError, StoreError, UnstorableError
from everstep.store.log import FactLog, NewFact
from everstep.store.queries import log_head, stream_position
from everstep.store.times import to_us
from everstep_services.history.fact_decoder import decode_batch
from everstep_services.history.notifier import LogNotifier
from everstep_services.history.settings import HistorySettings

log = logging.getLogger(__name__)

_SEEN_MOST = 1000
"""How many different complaints are remembered, so that each is logged once."""


class Projector:
    """One of any number of replicas; the one with the lease writes, the others stand by.

    What is not in the database is still in the stream, so nothing here needs to be saved:
    after any failure it reads on from the position that the database holds.
    """

    def __init__(  # noqa: PLR0913  each is a port or a setting
        self,
        settings: HistorySettings,
        bus: Bus,
        database: Database,
        fact_log: FactLog,
        notifier: LogNotifier,
        *,
        clock: Clock,
        name: str,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._database = database
        self._log = fact_log
        self._notifier = notifier
        self._clock = clock
        self._name = name
        self._held: Held | None = None
        self._renewed = 0.0
        self._complaints: set[tuple[str, str]] = set()
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the projector")
        self._failures = 0
        self.last_commit: datetime | None = None
        self.stands_by = True
        """Whether another replica had the lease when this one asked last."""

    @property
    def is_projecting(self) -> bool:
        """Whether it has the lease. Another replica may have taken it over meanwhile, unnoticed."""
        return self._held is not None

    def statistics(self) -> dict[str, float]:
        """What it counted so far, for metrics."""
        names = (
            "facts",
            "missed",
            "duplicates",
            "unknown",
            "refused",
            "unstorable",
            "unprojected",
            "batches",
            "retries",
        )
        counts = {f"{name}_total": float(self._counts[name]) for name in names}
        counts["input_failures_total"] = float(self._input_failures.failures)
        return {**counts, "projecting": float(self.is_projecting), "last_n": self._notifier.last_n}

    async def project_for_ever(self) -> None:
        """Take the lease whenever it is free, and write; survive bus and database failures."""
        while True:
            try:
                await self._bus.wait_connected()
                await self._project_while_leased()
                await self._clock.sleep(self._settings.lease_ttl_s / 3)
            except SchemaTooNewError:
                raise
            except (BusError, StoreError, TimeoutError) as error:
                await self._wait_after(error)
            except Exception as error:  # noqa: BLE001  the API answers from what is there
                self._input_failures.note("the projection", error)
                await self._wait_after(error)
            finally:
                self._held = None

    async def poll_for_ever(self) -> None:
        """Look for facts that another replica has written, while a task here waits for them."""
        while True:
            await self._clock.sleep(self._settings.poll_every_s)
            if self._notifier.waiting and not self.is_projecting:
                try:
                    head = await log_head(self._database)
                except StoreError as error:
                    log.debug("poll_failed error=%s", error)
                else:
                    self._notifier.announce(head.last_n)

    async def _project_while_leased(self) -> None:
        head = await log_head(self._database)
        self._notifier.announce(head.last_n)
        async with asyncio.timeout(self._settings.lease_ttl_s):
            name = f"history-{head.epoch}"
            self._held = await self._bus.leases.acquire(
                name, self._name, self._settings.lease_ttl_s
            )
        self.stands_by = self._held is None
        if self._held is None:
            return
        self._renewed = self._clock.now()
        log.info("projector_started epoch=%s last_n=%d", head.epoch, head.last_n)
        try:
            await self._catch_up()
            await self._read_on()
        except LeaseLostError as error:
            log.warning("projector_replaced error=%s", error)
        finally:
            await self._release()

    async def _read_on(self) -> None:
        position = await stream_position(self._database)
        after = None if position is None else StreamPosition(*position)
        async with self._bus.facts(after) as reader:
            while True:
                # Longer than the reader's own patience: this ends only one that is stuck.
                async with asyncio.timeout(self._settings.lease_ttl_s):
                    batch = await reader.fetch(
                        self._settings.batch_facts, self._settings.fetch_within_s
                    )
                if batch.missed:
                    self._counts["missed"] += batch.missed
                    log.error(
                        "facts_missed count=%d before=%d", batch.missed, batch.position.sequence
                    )
                if batch.facts:
                    await self._store(batch.position.stream, batch.facts)
                if 0 < len(batch.facts) < self._settings.batch_facts // 2:
                    await self._clock.sleep(self._settings.pace_s)
                await self._renew()

    async def _store(self, stream: str, delivered: Sequence[Delivered]) -> None:
        understood = decode_batch(delivered)
        for tag, times in understood.unknown.items():
            self._complain("unknown", tag, "kept, not projected: upgrade to see it", times)
        for subject, reason in understood.refused:
            self._complain("refused", subject, reason)
        await self._append(stream, understood.facts, delivered[-1].sequence)
        self._counts["batches"] += 1
        self._failures = 0

    async def _append(self, stream: str, facts: Sequence[NewFact], sequence: int) -> None:
        """Write the facts; if one cannot be stored, split the batch to skip only that fact."""
        self.last_commit = self._clock.wall()
        try:
            appended = await self._log.append(
                stream, facts, sequence=sequence, received_us=to_us(self.last_commit)
            )
        except Exception as error:
            if not facts or not _is_of_a_fact(error):
                raise
            await self._append_parts(stream, facts, sequence, error)
            return
        self._counts["facts"] += appended.added
        self._counts["duplicates"] += appended.duplicates
        self._counts["unprojected"] += appended.unprojected
        self._notifier.announce(appended.last_n)
        if not appended.is_projected:
            await self._catch_up()

    async def _append_parts(
        self, stream: str, facts: Sequence[NewFact], sequence: int, error: Exception
    ) -> None:
        if len(facts) == 1:
            self._complain("unstorable", facts[0].kind, str(error))
            await self._append(stream, [], sequence)
            return
        middle = len(facts) // 2
        await self._append(stream, facts[:middle], facts[middle - 1].sequence)
        await self._append(stream, facts[middle:], sequence)

    async def _catch_up(self) -> None:
        """Finish a rebuild that was begun."""
        remaining = await self._log.catch_up()
        if not remaining:
            return
        began = self._clock.now()
        log.info("rebuild_goes_on remaining=%d", remaining)
        while remaining:
            await self._renew()
            remaining = await self._log.catch_up()
        log.info("rebuild_done took_s=%.1f", self._clock.now() - began)

    async def _renew(self) -> None:
        assert self._held is not None
        if self._clock.now() - self._renewed < self._settings.lease_ttl_s / 3:
            return
        async with asyncio.timeout(self._settings.lease_ttl_s):
            self._held = await self._bus.leases.renew(self._held)
        self._renewed = self._clock.now()

    async def _release(self) -> None:
        held, self._held = self._held, None
        if held is None or not self._bus.connected:
            return
        try:
            async with asyncio.timeout(1):
                await self._bus.leases.release(held)
        except (BusError, TimeoutError) as error:
            log.debug("lease_not_released error=%s", error)  # it runs out by itself

    async def _wait_after(self, error: Exception) -> None:
        settings = self._settings
        self._failures += 1
        wait_s = backoff_s(self._failures, settings.retry_first_s, settings.retry_most_s)
        self._counts["retries"] += 1
        text = str(error) or type(error).__name__
        log.warning("projector_waits error=%s wait_s=%.1f", text, wait_s)
        await self._clock.sleep(wait_s)

    def _complain(self, problem: str, subject: str, reason: str, times: int = 1) -> None:
        self._counts[problem] += times
        key = (f"{problem} {subject}", reason[:80])
        if key not in self._complaints and len(self._complaints) < _SEEN_MOST:
            self._complaints.add(key)
            log.warning("fact_%s what=%s reason=%s", problem, subject, reason)


def _is_of_a_fact(error: Exception) -> bool:
    """Whether the error comes from a fact, and would come again with any database."""
    if isinstance(error, UnstorableError):
        return True
    return not isinstance(error, StoreError | BusError | TimeoutError | OSError)
