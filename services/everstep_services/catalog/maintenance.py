"""The work without a request: verify, delete, scan, clear leftovers, have copies repaired."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from everstep.bus.errors import BusError
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import ControlDocument, Done, RequestCopy, RoundDocument, Seat, ShowRound
from everstep.messages.codec import BadMessageError, decode_as
from everstep.messages.documents.health import combined
from everstep.subjects import CLUSTER
from everstep_services.catalog.domain.index import Index, not_committed
from everstep_services.catalog.domain.replication import Repair, is_quiet, judge, repairs
from everstep_services.catalog.domain.retention import RetentionRules
from everstep_services.catalog.domain.schedule import (
    ReadBackRules,
    rules_for,
    to_delete,
    to_verify,
)
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.operations import CheckpointOperations
from everstep_services.catalog.scanner import Scanner
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.catalog.storage_threads import SILENT_AFTER_S, OutOfReachError
from everstep_services.catalog.stores import CheckpointStores
from trainer_sdk.checkpoint.storage.leftovers import Leftover

log = logging.getLogger(__name__)

K = TypeVar("K")
Work = Callable[[], Awaitable[object]]
_SHOW_S = 1.5
_COPY_S = 4.0
_LOOK_S = 2.5
_WAITING_MOST = 1000
_RETRY_S = 60.0
_REMEMBERED = 10_000
_ROUNDS_REMEMBERED = 1000


class RoundReader:
    """Asks rendezvous about a job's round. Without an answer, nothing is repaired."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._wanted: dict[str, tuple[int, int]] = {}

    async def seats(self, job: str) -> Sequence[Seat]:
        """The seats of the round; none while rendezvous does not answer."""
        document = await self._show(job)
        return () if document is None else document.seats

    async def wanted_losses(self, job: str, round_: int) -> int | None:
        """The number of nodes whose loss the layout of copies must survive; None if unknown."""
        cached = self._wanted.get(job)
        if cached is not None and cached[0] == round_:
            return cached[1]
        document = await self._show(job)
        if document is None or document.round != round_:
            return None
        layout = document.replication
        wanted = 0 if layout is None else max(layout.factor - layout.parts_needed, 0)
        while len(self._wanted) >= _ROUNDS_REMEMBERED:
            self._wanted.pop(next(iter(self._wanted)))
        self._wanted[job] = (round_, wanted)
        return wanted

    async def _show(self, job: str) -> RoundDocument | None:
        try:
            return await self._bus.ask(
                "rendezvous",
                "show",
                ShowRound(job=job),
                RoundDocument,
                job=job,
                within_s=_SHOW_S,
            )
        except BusError:
            return None


@dataclass(frozen=True, slots=True)
class StoreLeftovers:
    """What failed saves have left in a root, and may be removed."""

    root: str
    leavings: Sequence[Leftover]


class Cleanup:
    """Removes what failed saves have left, but for files that a running round may still write."""

    def __init__(self, stores: CheckpointStores, after_s: float) -> None:
        self._stores = stores
        self._after_s = after_s

    async def look(self, index: Index, roots: Iterable[str]) -> Sequence[StoreLeftovers]:
        """The leftovers in each root."""
        live = index.round if index.slots else None
        return [
            StoreLeftovers(root, await self._stores.leavings(index.job, root, self._after_s, live))
            for root in roots
        ]

    async def look_soon(self, index: Index) -> tuple[Sequence[StoreLeftovers], str]:
        """The leftovers, for a caller who waits; or the reason why they are unknown."""
        try:
            async with asyncio.timeout(_LOOK_S):
                return await self.look(index, sorted(index.roots)), ""
        except TimeoutError:
            return (), f"a storage did not answer within {_LOOK_S:g} s"
        except OutOfReachError as error:
            return (), str(error)

    async def remove(self, job: str, leftovers: Iterable[StoreLeftovers]) -> int:
        """Remove leftovers that have not changed since; return their number."""
        removed = 0
        for leftover in leftovers:
            if leftover.leavings:
                count, freed = await self._stores.sweep(job, leftover.root, leftover.leavings)
                removed += count
                log.info("swept job=%s root=%s count=%d bytes=%d", job, leftover.root, count, freed)
        return removed


class Maintenance:
    """Every replica does what people requested; the leading replica looks for the rest."""

    def __init__(
        self,
        settings: CatalogSettings,
        bus: Bus,
        clock: Clock,
        indexer: Indexer,
        stores: CheckpointStores,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._indexer = indexer
        self._scanner = Scanner(indexer, stores)
        self.operations = CheckpointOperations(indexer, stores, self._scanner)
        self.cleanup = Cleanup(stores, settings.abandoned_after_s)
        self.rounds = RoundReader(bus)
        self._stores = stores
        self._waiting: dict[str, deque[Work]] = {}
        self._working: set[str] = set()
        """The jobs whose queued work is being done."""
        self._has_work = asyncio.Event()
        self._busy: set[tuple[str, str]] = set()
        """What is done for which job or root."""
        self._scanned: dict[str, float] = {}
        self._asked: dict[tuple[str, int], float] = {}
        self._not_before: dict[str, float] = {}
        self._not_glanced_before: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("maintenance")

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        names = ("verified", "flawed", "deleted", "swept", "scans", "repairs")
        counted = {f"{name}_total": float(self._counts[name]) for name in names}
        return {**counted, **self._stores.threads.statistics()}

    def enqueue(self, job: str, work: Work) -> bool:
        """Have work done after other work of this job; False if too much waits."""
        if sum(map(len, self._waiting.values())) >= _WAITING_MOST:
            return False
        self._waiting.setdefault(job, deque()).append(work)
        self._has_work.set()
        return True

    async def work_for_ever(self) -> None:
        """Do the queued work: that of a job in its order, and the jobs in parallel."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                for job in self._waiting.keys() - self._working:
                    self._working.add(job)
                    tasks.create_task(self._work(job))

    async def maintain_for_ever(self) -> None:
        """While this replica leads, look after the copies and files of each job."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._clock.sleep(self._settings.tend_every_s)
                if not self._indexer.leads:
                    continue
                for root in self._settings.roots:
                    if self._is_due(self._scanned, root, self._settings.scan_every_s):
                        await self._begin(tasks, "scanned", root, (root,), partial(self.scan, root))
                await self._for_each_job(tasks, "tended", self._maintain)

    async def read_back_for_ever(self) -> None:
        """While this replica leads, verify checkpoints that were not verified yet."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._clock.sleep(self._settings.tend_every_s)
                if self._indexer.leads:
                    await self._for_each_job(tasks, "read_back", self._read_back)

    async def _for_each_job(
        self, tasks: asyncio.TaskGroup, name: str, look: Callable[[str, Index], Awaitable[None]]
    ) -> None:
        for job, index in self._indexer.known():
            await self._begin(tasks, name, job, index.roots, partial(look, job, index))

    async def _begin(
        self, tasks: asyncio.TaskGroup, name: str, whose: str, roots: Collection[str], work: Work
    ) -> None:
        """Do some work; return when it is done, or goes on while a storage is silent."""
        if (name, whose) in self._busy:
            return
        self._busy.add((name, whose))
        task = tasks.create_task(self._guarded(name, whose, work))
        while not task.done() and not any(map(self._stores.threads.is_silent, roots)):
            await asyncio.wait({task}, timeout=SILENT_AFTER_S)

    async def _guarded(self, name: str, whose: str, work: Work) -> None:
        try:
            with self._input_failures.caught(f"{name} {whose}", f"not_{name} name={whose}"):
                await work()
        finally:
            self._busy.discard((name, whose))

    async def _work(self, job: str) -> None:
        """Do the queued work of a job, one piece after the other."""
        queue = self._waiting[job]
        while queue:
            work = queue.popleft()
            with self._input_failures.caught(f"a request for {job}", f"not_done job={job}"):
                await work()
        del self._waiting[job]
        self._working.discard(job)

    async def scan(self, root: str, job: str | None = None) -> str:
        """Compare the index with the files in a root; return the result in words."""
        seen, new, missing = await self._scanner.scan(root, job)
        self._counts["scans"] += 1
        if new or missing:
            log.info("scanned job=%s root=%s new=%d missing=%d", seen.job, root, new, missing)
        text = (
            f"{root}: {len(seen.checkpoints)} checkpoints of {seen.job}, {new} of them new to the "
            f"index, {missing} gone"
        )
        index = await self._indexer.read(seen.job)
        paths = {checkpoint.path for checkpoint in seen.checkpoints}
        flaws = [
            not_committed(checkpoint)
            for checkpoint in index.known.values()
            if checkpoint.path in paths
        ]
        return "; ".join([text, *filter(None, flaws)])

    async def glance(self, job: str) -> Index:
        """The index for a caller who waits; checkpoints without a folder are missing in it.

        The stored index follows, once the queue has looked at these checkpoints again.
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
                    self.enqueue(job, partial(self._scanner.look_again, job, root, steps))
        return index

    async def clean_up(self, job: str, leftovers: Iterable[StoreLeftovers]) -> None:
        """Remove what failed saves have left, and count it."""
        self._counts["swept"] += await self.cleanup.remove(job, leftovers)

    async def rules(self, job: str) -> tuple[RetentionRules, bool]:
        """The retention of a job, and whether the brake forbids it now."""
        switches = combined(await self._switches(CLUSTER), await self._switches(job))
        default = RetentionRules(self._settings.keep_last, self._settings.keep_every_steps)
        return rules_for(default, switches), switches.is_braked

    async def _maintain(self, job: str, index: Index) -> None:
        try:
            await self._maintain_copies(job, index)
            if not self._is_out_of_reach(job):
                await self._maintain_files(job, index)
        except BusError as error:
            log.info("job_not_tended job=%s error=%s", job, error)
        except OutOfReachError as error:
            self._not_before[job] = self._clock.now() + _RETRY_S
            log.info("files_not_tended job=%s error=%s", job, error)

    async def _read_back(self, job: str, index: Index) -> None:
        settings = self._settings
        rules = ReadBackRules(settings.verify, settings.verify_objects, settings.verify_again_s)
        if to_verify(index, rules, self._clock.wall()) is None or self._is_out_of_reach(job):
            return
        checkpoint = to_verify(await self._indexer.read(job), rules, self._clock.wall())
        if checkpoint is None:
            return  # another replica has verified or deleted it
        try:
            flaw = await self.operations.verify(job, checkpoint)
        except OutOfReachError as error:
            self._not_before[job] = self._clock.now() + _RETRY_S
            log.info("not_read_back path=%s error=%s", checkpoint.path, error)
            return
        self._counts["verified"] += flaw is not None
        self._counts["flawed"] += bool(flaw)

    def _is_out_of_reach(self, job: str) -> bool:
        """The job's files could not be reached within the last minute."""
        return self._clock.now() < self._not_before.get(job, 0.0)

    async def _maintain_files(self, job: str, index: Index) -> None:
        every_s = self._settings.scan_every_s
        due = [root for root in sorted(index.roots) if self._is_due(self._scanned, root, every_s)]
        for root in due:
            await self.scan(root, job)
            index = await self._indexer.read(job)
        rules, braked = await self.rules(job)
        if braked or not rules.keep_last:
            return
        for doomed, reason in to_delete(index, rules):
            if self.operations.is_read(job, doomed):
                continue  # otherwise a slow read-back would never finish
            done: Done = await self.operations.delete(job, doomed, reason, "retention")
            self._counts["deleted"] += not done.is_refused
        await self.clean_up(job, await self.cleanup.look(index, due))

    async def _maintain_copies(self, job: str, index: Index) -> None:
        if not index.slots or not index.uses_replicas:
            return
        wanted = await self.rounds.wanted_losses(job, index.round)
        if wanted is None or is_quiet(index, wanted):
            return
        after_s = self._settings.degraded_after_s
        await self._indexer.change(job, lambda index, now: judge(index, wanted, after_s, now))
        index = await self._indexer.read(job)
        if index.survivable_losses is None:
            return
        for repair in repairs(index, wanted, await self.rounds.seats(job)):
            if self._is_due(self._asked, (job, repair.slot), self._settings.repair_every_s):
                await self._request_copy(job, index.round, repair)

    async def _request_copy(self, job: str, round_: int, repair: Repair) -> None:
        question = RequestCopy(
            job=job,
            round=round_,
            owner_slot=repair.slot,
            step=repair.step,
            holder=repair.holder,
            to=repair.to,
            reason=repair.reason,
        )
        done = await self._bus.ask("rendezvous", "copy", question, Done, job=job, within_s=_COPY_S)
        self._counts["repairs"] += 1
        log.info("copy_asked job=%s slot=%d to=%s text=%r", job, repair.slot, repair.to, done.text)

    def _is_due(self, last: dict[K, float], key: K, every_s: float) -> bool:
        now = self._clock.now()
        if key in last and now - last[key] < every_s:
            return False
        if len(last) >= _REMEMBERED:
            last.clear()
        last[key] = now
        return True

    async def _switches(self, key: str) -> ControlDocument | None:
        document = await self._bus.documents("CONTROL").get(key)
        if document.data is None:
            return None
        try:
            return decode_as(document.data, ControlDocument)
        except BadMessageError as error:
            raise OutOfReachError(
                f"the catalog cannot read the switches of {key}: {error}"
            ) from error
