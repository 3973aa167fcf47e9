"""Reads and writes the document of each job, and puts on record what a write has decided."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress

from everstep.bus.errors import BusError, ConflictError
from everstep.bus.facts.codec import facts_in
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus, Document
from everstep.clock import Clock
from everstep.errors import EverstepError
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
    Moment,
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
    """Any replica may write: who comes second looks again, and finds it done."""

    def __init__(self, settings: StragglerSettings, bus: Bus, clock: Clock, jobs: Jobs) -> None:
        self._settings = settings
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
        """What it counted so far, for metrics."""
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

    async def settle(self, one: TrackedJob) -> None:
        """Write the changes of a job, and forget the job if it is over."""
        try:
            await self._settle(one)
        except (EverstepError, TimeoutError) as error:
            log.warning("stragglers_not_written job=%s error=%s", one.job, error)
        except Exception as error:  # noqa: BLE001  other jobs are as good as before
            self._input_failures.note(f"stragglers of {one.job}", error)

    async def claim(self, one: TrackedJob, finding: str, action: Action, fact: Fact) -> bool:
        """Whether it is up to this replica to act; `fact` is on record should it end before."""
        for _ in range(_ATTEMPTS):
            new = acted(one.document, finding, action, fact)
            if new is None:
                return False
            if await self._put(one, new):
                return True
        return False

    async def record(self, one: TrackedJob, facts: Iterable[Fact]) -> None:
        """Put facts on record that stand in the outbox, and take them out."""
        ids: set[str] = set()
        for fact in facts:
            await self._bus.record(fact)
            ids.add(fact.id)
        for _ in range(_ATTEMPTS):
            new = recorded(one.document, ids)
            if new == one.document or await self._put(one, new):
                return

    async def _settle(self, one: TrackedJob) -> None:
        if not one.is_primed:
            await self._prime(one)
        elif one.formed.is_outdated:
            await self._read_round(one)
        for _ in range(_ATTEMPTS):
            if not await self._write_what_fits(one):
                break
        await self._take_over(one)
        has_more = one.work.is_busy or one.changes or one.document.found or one.document.outbox
        if one.is_gone and not has_more and not one.is_in_aftermath(self._clock.now()):
            await self._remove(one)
            self._jobs.forget(one.job)

    async def _prime(self, one: TrackedJob) -> None:
        """Read what holds for the job, before anything is decided about it."""
        if not self._knows_cluster:
            self._switch(await self._controls.get(CLUSTER))
            self._knows_cluster = True
        self._switch(await self._controls.get(one.job))
        found = await self._documents.get(one.job)
        one.see(_decoded(found), found.revision, self._clock.now())
        await self._read_round(one)
        one.is_primed = True

    async def _read_round(self, one: TrackedJob) -> None:
        """Learn the newest round from rendezvous: agents may claim any."""
        if self._clock.now() - one.formed.read_at < _ROUND_AT_MOST_EVERY_S:
            return
        one.formed.is_outdated = False
        found, document = await self._rounds.get(one.job), None
        try:
            if found.data is not None:
                document = decode_as(found.data, RoundDocument)
        except BadMessageError as error:
            self._input_failures.note(f"the round of {one.job}", error)
        one.see_round(document, self._clock.now())

    async def _remove(self, one: TrackedJob) -> None:
        """A job of the same name begins without what was switched for this one."""
        if one.revision and not one.is_removed:
            with suppress(ConflictError):  # another replica was first, or the job is back
                await self._documents.delete(one.job, revision=one.revision)

    async def _write_what_fits(self, one: TrackedJob) -> bool:
        """As `_write`; changes that cannot be written are dropped, so that others can be."""
        try:
            return await self._write(one)
        except BadMessageError:
            if not self._refuse_bad(one):
                raise
            return True

    def _refuse_bad(self, one: TrackedJob) -> bool:
        """Whether a change that waits was the reason: it is dropped, and counted."""
        document, moment = one.document, Moment(self._clock.wall(), one.view.round)
        waiting = len(one.changes)
        for change in list(one.changes)[:_CHANGES_AT_ONCE]:
            try:
                new = revised(document, [change], moment).document
                encode(new)
            except BadMessageError as error:
                one.refuse(change, "cannot be written")
                self._input_failures.note(f"change of {one.job}", error)
            else:
                document = new
        return len(one.changes) < waiting

    async def _write(self, one: TrackedJob) -> bool:
        """Write new changes; return False when there are no more."""
        taken = list(one.changes)[:_CHANGES_AT_ONCE]
        if len(one.document.outbox) > _OUTBOX_MOST:
            taken = []
        is_all = len(taken) == len(one.changes) and not one.work.is_busy
        over = one.over if is_all else ""
        if not one.switches.is_on:
            over = over or SWITCHED_OFF
        before = one.document
        moment = Moment(self._clock.wall(), one.view.round)
        base = measured(before, one.switches, self._suggested(one))
        new = revised(base, taken, moment, over)
        if new.document == before and (one.revision or one.is_gone):
            self._drop(one, len(taken))
            return False
        if await self._put(one, new.document):
            self._drop(one, len(taken))
            self._count(one, new.facts)
            if new.facts:
                await self.record(one, new.facts)
        return True

    def _suggested(self, one: TrackedJob) -> int | None:
        """How many steps a window is to have, if that may change now: replicas must not argue."""
        since = one.steps_since
        if since is not None and self._clock.now() - since < _STEPS_AT_MOST_EVERY_S:
            return None
        return one.view.window_steps

    def _drop(self, one: TrackedJob, count: int) -> None:
        for _ in range(min(count, len(one.changes))):
            one.changes.popleft()

    async def _put(self, one: TrackedJob, new: StragglersDocument) -> bool:
        """False when another replica wrote first; then the job is as that one has written it."""
        try:
            revision = await self._documents.put(one.job, encode(new), revision=one.revision)
        except ConflictError:
            self._counts["conflicts"] += 1
            found = await self._documents.get(one.job)
            one.see(_decoded(found), found.revision, self._clock.now())
            return False
        one.see(new, revision, self._clock.now())
        return True

    async def _take_over(self, one: TrackedJob) -> None:
        """Record what another replica has decided, and has not put on record."""
        now, outbox = self._clock.now(), one.document.outbox
        one.unrecorded = {text: one.unrecorded.get(text, now) for text in outbox}
        old = [text for text, at in one.unrecorded.items() if now - at >= self._settings.takeover_s]
        if old:
            log.info("facts_taken_over job=%s count=%d", one.job, len(old))
            await self.record(one, facts_in(old))

    def _see(self, news: Document) -> None:
        now = self._clock.now()
        document = _decoded(news)
        one = self._jobs.get(news.key)
        if one is None and document is not None and _needs_care(document):
            one = self._jobs.track(news.key, now)
        if one is not None and not 0 < news.revision <= one.revision:
            one.see(document, news.revision, now)

    def _switch(self, news: Document) -> None:
        document = None if news.data is None else decode_as(news.data, ControlDocument)
        self._jobs.control(news.key, document)

    def _count(self, one: TrackedJob, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self._counts[_COUNTED[type(fact)]] += 1
            log.info("%s job=%s reason=%r", kind_of(fact), one.job, getattr(fact, "reason", ""))


_COUNTED: Mapping[type[Fact], str] = {
    StragglerFound: "found",
    StragglerCleared: "cleared",
    StepTimeShifted: "shifted",
}


def _needs_care(document: StragglersDocument) -> bool:
    """Somebody must clear what is found, record what waits, or switch timings on again."""
    return bool(document.found or document.outbox) or not document.is_on


def _decoded(found: Document) -> StragglersDocument | None:
    if found.data is None:
        return None
    try:
        return decode_as(found.data, StragglersDocument)
    except BadMessageError as error:
        raise BusError(
            f"what the bus holds about slow ranks of {found.key} cannot be read ({error}): a newer "
            f"release may have written it; else remove key {found.key} of bucket {_BUCKET}"
        ) from error
