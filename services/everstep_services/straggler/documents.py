"""Reads and writes the document of each job, and records the facts that a write decides."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress

from everstep.bus.derived_ids import DerivedIds
from everstep.bus.errors import BusError, ConflictError
from everstep.bus.facts.codec import facts_in
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus, Document
from everstep.clock import Clock
from everstep.messages import (
    ControlDocument,
    Fact,
    RoundDocument,
    StepTimeShifted,
    StragglerCleared,
    StragglerFound,
    StragglersDocument,
    kind_of,
)
from everstep.messages.codec import BadMessageError, decode_as, encode
from everstep.subjects import CLUSTER
from everstep_services.straggler.domain.findings import (
    FindingContext,
    acted,
    measured,
    recorded,
    revised,
)
from everstep_services.straggler.domain.policy import Action
from everstep_services.straggler.domain.switches import SWITCHED_OFF
from everstep_services.straggler.jobs import Jobs, TrackedJob
from everstep_services.straggler.settings import StragglerSettings

log = logging.getLogger(__name__)

_BUCKET = "STRAGGLERS"
_ATTEMPTS = 10
_CHANGES_AT_ONCE = 50
_OUTBOX_MOST = 100
_STEPS_AT_MOST_EVERY_S = 60.0
_ROUND_AT_MOST_EVERY_S = 1.0


class JobDocuments:
    """Any replica may write: the second replica reads again, and finds the change made."""

    def __init__(
        self, settings: StragglerSettings, bus: Bus, clock: Clock, jobs: Jobs, ids: DerivedIds
    ) -> None:
        self._settings = settings
        self._ids = ids
        self._bus = bus
        self._clock = clock
        self._jobs = jobs
        self._documents = bus.documents(_BUCKET)
        self._controls = bus.documents("CONTROL")
        self._rounds = bus.documents("ROUNDS")
        self._knows_cluster = False
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the documents")

    def statistics(self) -> dict[str, float]:
        """Return the counts so far, for metrics."""
        names = ("found", "cleared", "shifted", "conflicts")
        counts = {f"{name}_total": float(self._counts[name]) for name in names}
        return {**counts, "document_failures_total": float(self._input_failures.failures)}

    async def follow_for_ever(self) -> None:
        """Learn what other replicas write."""
        async with self._documents.follow() as documents:
            async for news in documents:
                with self._input_failures.caught("a document of slow ranks"):
                    self._see(news)

    async def follow_switches_for_ever(self) -> None:
        """Learn what operators switch."""
        async with self._controls.follow() as documents:
            async for news in documents:
                with self._input_failures.caught("switches"):
                    self._switch(news)

    async def settle(self, job: TrackedJob) -> None:
        """Write the changes of a job, and forget the job if it is over."""
        event = f"stragglers_not_written job={job.job}"
        with self._input_failures.caught(f"stragglers of {job.job}", event):
            await self._settle(job)

    async def claim(self, job: TrackedJob, finding: str, action: Action, fact: Fact) -> bool:
        """Return whether this replica acts; `fact` is recorded if it ends before it has acted."""
        for _ in range(_ATTEMPTS):
            new = acted(job.document, finding, action, fact)
            if new is None:
                return False
            if await self._put(job, new):
                return True
        return False

    async def record(self, job: TrackedJob, facts: Iterable[Fact]) -> None:
        """Record facts of the outbox, and remove them from it."""
        ids: set[str] = set()
        for fact in facts:
            await self._bus.record(fact)
            ids.add(fact.id)
        for _ in range(_ATTEMPTS):
            new = recorded(job.document, ids)
            if new == job.document or await self._put(job, new):
                return

    async def _settle(self, job: TrackedJob) -> None:
        if not job.is_primed:
            await self._prime(job)
        elif job.formed.is_outdated:
            await self._read_round(job)
        for _ in range(_ATTEMPTS):
            if not await self._write_what_fits(job):
                break
        await self._take_over(job)
        has_more = job.work.is_busy or job.changes or job.document.found or job.document.outbox
        if job.is_gone and not has_more and not job.is_in_aftermath(self._clock.now()):
            await self._remove(job)
            self._jobs.forget(job.job)

    async def _prime(self, job: TrackedJob) -> None:
        """Read the job's switches and document before anything is decided about it."""
        if not self._knows_cluster:
            self._switch(await self._controls.get(CLUSTER))
            self._knows_cluster = True
        self._switch(await self._controls.get(job.job))
        stored = await self._documents.get(job.job)
        job.see(_decoded(stored), stored.revision, self._clock.now())
        await self._read_round(job)
        job.is_primed = True

    async def _read_round(self, job: TrackedJob) -> None:
        """Learn the newest round from rendezvous: an agent may claim any round."""
        if self._clock.now() - job.formed.read_at < _ROUND_AT_MOST_EVERY_S:
            return
        job.formed.is_outdated = False
        stored, document = await self._rounds.get(job.job), None
        try:
            if stored.data is not None:
                document = decode_as(stored.data, RoundDocument)
        except BadMessageError as error:
            self._input_failures.note(f"the round of {job.job}", error)
        job.see_round(document, self._clock.now())

    async def _remove(self, job: TrackedJob) -> None:
        """Delete the document, so that a later job of this name begins without its switches."""
        if job.revision and not job.is_removed:
            with suppress(ConflictError):  # another replica was first, or the job is back
                await self._documents.delete(job.job, revision=job.revision)

    async def _write_what_fits(self, job: TrackedJob) -> bool:
        """As `_write`; a change that cannot be written is dropped, so that the others can be."""
        try:
            return await self._write(job)
        except BadMessageError:
            if not self._refuse_bad(job):
                raise
            return True

    def _refuse_bad(self, job: TrackedJob) -> bool:
        """Drop and count waiting changes that cannot be written; return whether there were any."""
        document, moment = job.document, self._moment(job)
        waiting = len(job.changes)
        for change in list(job.changes)[:_CHANGES_AT_ONCE]:
            try:
                new = revised(document, [change], moment).document
                encode(new)
            except BadMessageError as error:
                job.refuse(change, "cannot be written")
                self._input_failures.note(f"change of {job.job}", error)
            else:
                document = new
        return len(job.changes) < waiting

    async def _write(self, job: TrackedJob) -> bool:
        """Write new changes; return False when there are no more."""
        taken = list(job.changes)[:_CHANGES_AT_ONCE]
        if len(job.document.outbox) > _OUTBOX_MOST:
            taken = []
        is_all = len(taken) == len(job.changes) and not job.work.is_busy
        over = job.over if is_all else ""
        if not job.switches.is_on:
            over = over or SWITCHED_OFF
        before = job.document
        moment = self._moment(job)
        base = measured(before, job.switches, self._suggested(job))
        new = revised(base, taken, moment, over)
        if new.document == before and (job.revision or job.is_gone):
            self._drop(job, len(taken))
            return False
        if await self._put(job, new.document):
            self._drop(job, len(taken))
            self._count(job, new.facts)
            if new.facts:
                await self.record(job, new.facts)
        return True

    def _suggested(self, job: TrackedJob) -> int | None:
        """The steps of a window, if they may change now: replicas must not change them in turn."""
        since = job.steps_since
        if since is not None and self._clock.now() - since < _STEPS_AT_MOST_EVERY_S:
            return None
        return job.snapshot.window_steps

    def _moment(self, job: TrackedJob) -> FindingContext:
        return FindingContext(self._clock.wall(), job.snapshot.round, self._ids.of)

    def _drop(self, job: TrackedJob, count: int) -> None:
        for _ in range(min(count, len(job.changes))):
            job.changes.popleft()

    async def _put(self, job: TrackedJob, new: StragglersDocument) -> bool:
        """Return False if another replica wrote first; the job then has that replica's document."""
        try:
            revision = await self._documents.put(job.job, encode(new), revision=job.revision)
        except ConflictError:
            self._counts["conflicts"] += 1
            stored = await self._documents.get(job.job)
            job.see(_decoded(stored), stored.revision, self._clock.now())
            return False
        job.see(new, revision, self._clock.now())
        return True

    async def _take_over(self, job: TrackedJob) -> None:
        """Record the facts that another replica has decided and not recorded."""
        now, outbox = self._clock.now(), job.document.outbox
        job.unrecorded = {text: job.unrecorded.get(text, now) for text in outbox}
        old = [text for text, at in job.unrecorded.items() if now - at >= self._settings.takeover_s]
        if old:
            log.info("facts_taken_over job=%s count=%d", job.job, len(old))
            await self.record(job, facts_in(old))

    def _see(self, news: Document) -> None:
        now = self._clock.now()
        document = _decoded(news)
        job = self._jobs.get(news.key)
        if job is None and document is not None and _needs_care(document):
            job = self._jobs.track(news.key, now)
        if job is not None and not 0 < news.revision <= job.revision:
            job.see(document, news.revision, now)

    def _switch(self, news: Document) -> None:
        document = None if news.data is None else decode_as(news.data, ControlDocument)
        self._jobs.control(news.key, document)

    def _count(self, job: TrackedJob, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self._counts[_COUNTED[type(fact)]] += 1
            log.info("%s job=%s reason=%r", kind_of(fact), job.job, getattr(fact, "reason", ""))


_COUNTED: Mapping[type[Fact], str] = {
    StragglerFound: "found",
    StragglerCleared: "cleared",
    StepTimeShifted: "shifted",
}


def _needs_care(document: StragglersDocument) -> bool:
    """Findings must be cleared, waiting facts recorded, or timings switched on again."""
    return bool(document.found or document.outbox) or not document.is_on


def _decoded(stored: Document) -> StragglersDocument | None:
    if stored.data is None:
        return None
    try:
        return decode_as(stored.data, StragglersDocument)
    except BadMessageError as error:
        raise BusError(
            f"the document about slow ranks of {stored.key} cannot be read ({error}): a "
            f"newer release may have written it; else remove key {stored.key} of bucket {_BUCKET}"
        ) from error
