"""Learns the limits of every job from its beats, and writes them for the job's agents."""

import logging
from collections import Counter

from everstep import subjects
from everstep.bus.errors import BusError, ConflictError
from everstep.bus.facts.recorder import Recorder
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.ids import new_id
from everstep.messages import Done, LimitsDocument, LimitsLearned, NodeBeat, ProgressMade, SetLimit
from everstep.messages.codec import BadMessageError, decode_as, encode
from everstep_services.health.domain.limit_learner import (
    LimitLearner,
    changed,
    configured,
    first_step_limit_s,
)
from everstep_services.health.settings import LimitSettings

log = logging.getLogger(__name__)

_BUCKET = "LIMITS"
_ATTEMPTS = 10
_OUTSIDE = "outside"
_NAME_MOST = 64


class LearnedLimits:
    """The `LIMITS` documents. All replicas learn the same limits, so any of them may write."""

    def __init__(self, settings: LimitSettings, bus: Bus, clock: Clock, records: Recorder) -> None:
        self._settings = settings
        self._bus = bus
        self._documents = bus.documents(_BUCKET)
        self._clock = clock
        self._records = records
        self._learners: dict[str, LimitLearner] = {}
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the learned limits")

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        return {f"{name}_total": float(self._counts[name]) for name in ("limits", "conflicts")}

    def hear(self, beat: NodeBeat) -> None:
        """Take in a beat; every tenth has the times of sections."""
        if beat.sections or beat.config_fingerprint:
            self._learner(beat.job).hear(beat, self._clock.now())

    def end_job(self, job: str) -> None:
        """The job is over; its document stays."""
        self._learners.pop(job, None)

    async def follow_starts_for_ever(self) -> None:
        """Follow how long rounds take until their first step."""
        subject = subjects.fact(None, "progress_made")
        async with self._bus.subscribe(subject, ProgressMade) as progress:
            async for fact in progress:
                if fact.is_first:
                    with self._input_failures.caught("a first step"):
                        learner = self._learner(fact.job)
                        learner.started(fact.round, fact.steps_s, self._clock.now())

    async def write_for_ever(self) -> None:
        """Write the learned limits every `write_every_s`."""
        while True:
            await self._clock.sleep(self._settings.write_every_s)
            await self._bus.wait_connected()
            for job, learner in list(self._learners.items()):
                if not learner.has_news:
                    continue
                learner.has_news = False
                try:
                    await self._write(job, learner)
                except ConflictError:
                    self._counts["conflicts"] += 1  # the next beats bring it again
                except (BusError, BadMessageError, TimeoutError) as error:
                    log.warning("limits_not_written job=%s error=%s", job, error)
                except Exception as error:  # noqa: BLE001  the limits of other jobs must go on
                    self._input_failures.note(f"limits of {job}", error)

    async def show(self, job: str) -> LimitsDocument:
        """The limits of a job that are in force."""
        document, _ = await self._read(job)
        if document is None:
            return self._unlearned(job)
        return document

    async def set(self, ask: SetLimit) -> Done:
        """Set an operator's limit, or return the section to what was learned."""
        section = "" if ask.limit.section == _OUTSIDE else ask.limit.section
        limit_s = ask.limit.limit_s
        if limit_s < 0 or len(section.encode()) > _NAME_MOST:
            raise RefusalError(
                "422",
                f"health cannot use a limit of {limit_s:g} s for {section[:_NAME_MOST]!r}: give "
                f"seconds above 0, or 0 to have it learned, and a name of at most {_NAME_MOST} "
                f"bytes",
            )
        for _ in range(_ATTEMPTS):
            document, revision = await self._read(ask.job)
            old = document or self._unlearned(ask.job)
            new = configured(old, section, limit_s, self._settings)
            if new != old:
                try:
                    revision = await self._documents.put(ask.job, encode(new), revision=revision)
                except ConflictError:
                    continue
                self._record(old, new, f"{ask.by}: {ask.reason}", revision)
            break
        else:
            raise RefusalError(
                "503", f"other replicas keep changing the limits of {ask.job}: ask again"
            )
        place = f"section {section}" if section else "the time outside all sections"
        value = f"{limit_s:g} s from now on" if limit_s else "learned again"
        return Done(text=f"the limit of {place} is {value}")

    def forget(self, idle_s: float) -> None:
        """Drop the jobs that were not heard for `idle_s`."""
        before_s = self._clock.now() - idle_s
        for job, learner in list(self._learners.items()):
            if learner.heard_s < before_s:
                del self._learners[job]

    async def _write(self, job: str, learner: LimitLearner) -> None:
        document, revision = await self._read(job)
        new = learner.proposed(job, document)
        if new is None:
            return
        revision = await self._documents.put(job, encode(new), revision=revision)
        self._record(document or self._unlearned(job), new, new.reason, revision)

    def _record(self, old: LimitsDocument, new: LimitsDocument, reason: str, revision: int) -> None:
        names = changed(old, new)
        self._counts["limits"] += 1
        log.info("limits_learned job=%s changed=%s", new.job, ",".join(names))
        self._records.keep(
            LimitsLearned(
                id=new_id(),
                job=new.job,
                at=self._clock.wall(),
                source="health",
                round=new.round,
                limits=new.limits,
                changed=names,
                reason=reason,
                revision=revision,
            )
        )

    async def _read(self, job: str) -> tuple[LimitsDocument | None, int]:
        document = await self._documents.get(job)
        if document.data is None:
            return None, 0
        return decode_as(document.data, LimitsDocument), document.revision

    def _unlearned(self, job: str) -> LimitsDocument:
        return LimitsDocument(
            job=job,
            limits=(),
            first_step_limit_s=first_step_limit_s(None, self._settings),
            reason="health has learned nothing yet: the defaults of the job's agents hold",
        )

    def _learner(self, job: str) -> LimitLearner:
        learner = self._learners.get(job)
        if learner is None:
            learner = self._learners[job] = LimitLearner(self._settings)
        return learner
