"""Does what is to be done by itself: reads back, deletes, scans, asks for copies."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from everstep.bus.containment import Containment
from everstep.bus.errors import BusError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.messages import ControlDocument, Done, RequestCopy
from everstep.messages.codec import BadMessageError, decode_as
from everstep.subjects import CLUSTER
from everstep_services.catalog.domain.index import Index, not_committed
from everstep_services.catalog.domain.replication import Repair, is_quiet, judge, repairs
from everstep_services.catalog.domain.retention import Rules
from everstep_services.catalog.domain.schedule import (
    Reading,
    is_braked,
    rules_for,
    to_delete,
    to_verify,
)
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.operations import Deeds
from everstep_services.catalog.rounds import Rounds
from everstep_services.catalog.scanner import Scanner
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.catalog.stores import OutOfReachError, Shelves
from everstep_services.catalog.sweeping import Left, Sweeper

log = logging.getLogger(__name__)

K = TypeVar("K")
Work = Callable[[], Awaitable[object]]
_ASK_S = 4.0
_WAITING_MOST = 1000
_RETRY_S = 60.0
_REMEMBERED = 10_000


class Tender:
    """Every replica does what it was asked; the one with the lease looks for what nobody asks."""

    def __init__(
        self, settings: CatalogSettings, bus: Bus, clock: Clock, indexer: Indexer, shelves: Shelves
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._indexer = indexer
        self._scanner = Scanner(indexer, shelves)
        self.deeds = Deeds(indexer, shelves, self._scanner)
        self.sweeper = Sweeper(shelves, settings.abandoned_after_s)
        self.rounds = Rounds(bus)
        self._waiting: deque[Work] = deque()
        self._has_work = asyncio.Event()
        self._scanned: dict[str, float] = {}
        self._asked: dict[tuple[str, int], float] = {}
        self._not_before: dict[str, float] = {}
        self._not_glanced_before: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._contained = Containment("the tender")

    def statistics(self) -> dict[str, float]:
        """What it counted so far, for metrics."""
        names = ("verified", "flawed", "deleted", "swept", "scans", "repairs")
        return {f"{name}_total": float(self._counts[name]) for name in names}

    def soon(self, work: Work) -> bool:
        """Have it done, after what was asked before; False when too much waits already."""
        if len(self._waiting) >= _WAITING_MOST:
            return False
        self._waiting.append(work)
        self._has_work.set()
        return True

    async def work_for_ever(self) -> None:
        """Do what was asked, one after the other."""
        while True:
            while not self._waiting:
                self._has_work.clear()
                await self._has_work.wait()
            work = self._waiting.popleft()
            try:
                await work()
            except (EverstepError, TimeoutError) as error:
                log.warning("not_done error=%s", error)
            except Exception as error:  # noqa: BLE001  others wait for theirs
                self._contained.note("what was asked", error)

    async def look_for_ever(self) -> None:
        """While this replica leads, look what is to be done about each job."""
        while True:
            await self._clock.sleep(self._settings.tend_every_s)
            if not self._indexer.leads:
                continue
            try:
                await self._scan_settings()
            except (EverstepError, TimeoutError) as error:
                log.warning("not_tended error=%s", error)
            except Exception as error:  # noqa: BLE001  what stores hold is not ours to trust
                self._contained.note("the roots of the settings", error)
            await self._for_each_job("tended", self._tend)

    async def read_back_for_ever(self) -> None:
        """While this replica leads, read back what nobody has read back yet."""
        while True:
            await self._clock.sleep(self._settings.tend_every_s)
            if self._indexer.leads:
                await self._for_each_job("read_back", self._read_back)

    async def _for_each_job(self, what: str, look: Callable[[str, Index], Awaitable[None]]) -> None:
        for job, index in self._indexer.known():
            try:
                await look(job, index)
            except (EverstepError, TimeoutError) as error:
                log.warning("not_%s job=%s error=%s", what, job, error)
            except Exception as error:  # noqa: BLE001  other jobs are as good as before
                self._contained.note(f"{what} {job}", error)

    async def scan(self, root: str, job: str | None = None) -> str:
        """Compare the index with a root; what came of it."""
        seen, new, missing = await self._scanner.scan(root, job)
        self._counts["scans"] += 1
        if new or missing:
            log.info("scanned job=%s root=%s new=%d missing=%d", seen.job, root, new, missing)
        text = (
            f"{root}: {len(seen.checkpoints)} checkpoints of {seen.job}, {new} of them new to the "
            f"index, {missing} gone"
        )
        index = await self._indexer.read(seen.job)
        paths = {one.path for one in seen.checkpoints}
        wrong = [not_committed(one) for one in index.known.values() if one.path in paths]
        return "; ".join([text, *filter(None, wrong)])

    async def glance(self, job: str) -> Index:
        """How it stands, for somebody who waits: what has no folder any more is missing in it.

        The index itself follows, once that was looked at again.
        """
        index = await self._indexer.read(job)
        for root in sorted(index.roots):
            if self._clock.now() < self._not_glanced_before.get(root, 0.0):
                continue
            try:
                steps = await self._scanner.glance(index, root)
            except OutOfReachError as error:
                self._not_glanced_before[root] = self._clock.now() + _RETRY_S
                log.info("not_glanced job=%s root=%s error=%s", job, root, error)
            else:
                if steps:
                    self.soon(partial(self._scanner.look_again, job, root, steps))
        return index

    async def sweep(self, job: str, found: Iterable[Left]) -> None:
        """Clear away what saves have left that came to nothing."""
        self._counts["swept"] += await self.sweeper.sweep(job, found)

    async def rules(self, job: str) -> tuple[Rules, bool]:
        """What is kept of a job's checkpoints, and whether nothing may be deleted now."""
        switches = [await self._switches(CLUSTER), await self._switches(job)]
        default = Rules(self._settings.keep_last, self._settings.keep_every_steps)
        return rules_for(default, *switches), is_braked(*switches)

    async def _tend(self, job: str, index: Index) -> None:
        try:
            await self._tend_copies(job, index)
            if not self._is_out_of_reach(job):
                await self._tend_files(job, index)
        except BusError as error:
            log.info("job_not_tended job=%s error=%s", job, error)
        except OutOfReachError as error:
            self._not_before[job] = self._clock.now() + _RETRY_S
            log.info("files_not_tended job=%s error=%s", job, error)

    async def _read_back(self, job: str, index: Index) -> None:
        how = self._settings
        reading = Reading(how.verify, how.verify_objects, how.verify_again_s)
        if to_verify(index, reading, self._clock.wall()) is None or self._is_out_of_reach(job):
            return
        one = to_verify(await self._indexer.read(job), reading, self._clock.wall())
        if one is None:
            return  # another replica has done it, or deleted it
        try:
            flaw = await self.deeds.verify(job, one)
        except OutOfReachError as error:
            self._not_before[job] = self._clock.now() + _RETRY_S
            log.info("not_read_back path=%s error=%s", one.path, error)
            return
        self._counts["verified"] += flaw is not None
        self._counts["flawed"] += bool(flaw)

    def _is_out_of_reach(self, job: str) -> bool:
        """Its files could not be reached a moment ago."""
        return self._clock.now() < self._not_before.get(job, 0.0)

    async def _tend_files(self, job: str, index: Index) -> None:
        every_s = self._settings.scan_every_s
        due = [one for one in sorted(index.roots) if self._is_due(self._scanned, one, every_s)]
        for root in due:
            await self.scan(root, job)
            index = await self._indexer.read(job)
        rules, braked = await self.rules(job)
        if braked or not rules.keep_last:
            return
        for doomed, reason in to_delete(index, rules):
            if self.deeds.is_read(job, doomed):
                continue  # else slow reading would never come to an end, nor to a newer good one
            done: Done = await self.deeds.delete(job, doomed, reason, "retention")
            self._counts["deleted"] += not done.is_refused
        await self.sweep(job, await self.sweeper.look(index, due))

    async def _tend_copies(self, job: str, index: Index) -> None:
        if not index.slots or not index.uses_replicas:
            return
        wanted = await self.rounds.wanted_losses(job, index.round)
        if wanted is None or is_quiet(index, wanted):
            return
        after_s = self._settings.degraded_after_s
        await self._indexer.change(job, lambda found, now: judge(found, wanted, after_s, now))
        index = await self._indexer.read(job)
        if index.survivable_losses is None:
            return
        for repair in repairs(index, wanted, await self.rounds.seats(job)):
            if self._is_due(self._asked, (job, repair.slot), self._settings.repair_every_s):
                await self._ask_for(job, index.round, repair)

    async def _ask_for(self, job: str, round_: int, repair: Repair) -> None:
        question = RequestCopy(
            job=job,
            round=round_,
            owner_slot=repair.slot,
            step=repair.step,
            holder=repair.holder,
            to=repair.to,
            reason=repair.reason,
        )
        done = await self._bus.ask("rendezvous", "copy", question, Done, job=job, within_s=_ASK_S)
        self._counts["repairs"] += 1
        log.info("copy_asked job=%s slot=%d to=%s text=%r", job, repair.slot, repair.to, done.text)

    async def _scan_settings(self) -> None:
        for root in self._settings.roots:
            if self._is_due(self._scanned, root, self._settings.scan_every_s):
                try:
                    await self.scan(root)
                except OutOfReachError as error:
                    log.info("root_not_scanned root=%s error=%s", root, error)

    def _is_due(self, last: dict[K, float], key: K, every_s: float) -> bool:
        now = self._clock.now()
        if key in last and now - last[key] < every_s:
            return False
        if len(last) >= _REMEMBERED:
            last.clear()
        last[key] = now
        return True

    async def _switches(self, key: str) -> ControlDocument | None:
        found = await self._bus.documents("CONTROL").get(key)
        if found.data is None:
            return None
        try:
            return decode_as(found.data, ControlDocument)
        except BadMessageError as error:
            raise OutOfReachError(f"the switches of {key} cannot be read: {error}") from error
