"""Learns the limits of every job from its beats, and writes them down for its agents."""

import logging
from collections import Counter

from everstep import subjects
from everstep.bus.asking import RefusalError
from everstep.bus.containment import Containment
from everstep.bus.errors import BusError, ConflictError
from everstep.bus.ports import Bus
from everstep.bus.recorder import Recorder
from everstep.clock import Clock
from everstep.ids import new_id
from everstep.messages import (
    Done,
    LimitsDocument,
    LimitsLearned,
    NodeBeat,
    ProgressMade,
    SetLimit,
)
from everstep.messages.codec import BadMessageError, decode_as, encode
from everstep_services.health.domain.limits import Lessons, LimitRules, changed, configured
from everstep_services.health.settings import LimitSettings

log = logging.getLogger(__name__)

_BUCKET = "LIMITS"
_ATTEMPTS = 10
_OUTSIDE = "outside"
_NAME_MOST = 64


class Teacher:
    """One of any number of replicas: all learn the same; whoever writes first has written it."""

    def __init__(self, settings: LimitSettings, bus: Bus, clock: Clock, records: Recorder) -> None:
        self._settings = settings
        self._rules = rules_of(settings)
        self._bus = bus
        self._documents = bus.documents(_BUCKET)
        self._clock = clock
        self._records = records
        self._lessons: dict[str, Lessons] = {}
        self._counts: Counter[str] = Counter()
        self._contained = Containment("the teacher")

    def statistics(self) -> dict[str, float]:
        """What it counted so far, for metrics."""
        return {f"{name}_total": float(self._counts[name]) for name in ("limits", "conflicts")}

    def hear(self, beat: NodeBeat) -> None:
        """A beat; every tenth says how long sections took."""
        if beat.sections or beat.config_fingerprint:
            self._of(beat.job).hear(beat, self._clock.now())

    def end_job(self, job: str) -> None:
        """The job is over. What it taught stays in its document."""
        self._lessons.pop(job, None)

    async def follow_starts_for_ever(self) -> None:
        """Hear how long rounds take until their first step."""
        subject = subjects.fact(None, "progress_made")
        async with self._bus.subscribe(subject, ProgressMade) as progress:
            async for fact in progress:
                if fact.is_first:
                    with self._contained.of("a first step"):
                        lessons = self._of(fact.job)
                        lessons.started(fact.round, fact.steps_s, self._clock.now())

    async def teach_for_ever(self) -> None:
        """Write down what was learned, so often at most."""
        while True:
            await self._clock.sleep(self._settings.write_every_s)
            await self._bus.wait_connected()
            for job, lessons in list(self._lessons.items()):
                if not lessons.has_news:
                    continue
                lessons.has_news = False
                try:
                    await self._teach(job, lessons)
                except ConflictError:
                    self._counts["conflicts"] += 1  # the next beats come to the same
                except (BusError, BadMessageError, TimeoutError) as error:
                    log.warning("limits_not_written job=%s error=%s", job, error)
                except Exception as error:  # noqa: BLE001  other jobs learn all the same
                    self._contained.note(f"limits of {job}", error)

    async def show(self, job: str) -> LimitsDocument:
        """The limits that are in force."""
        document, _ = await self._read(job)
        if document is None:
            return self._unlearned(job)
        return document

    async def set(self, ask: SetLimit) -> Done:
        """Put a limit in the place of what was learned, or take it away again."""
        section = "" if ask.limit.section == _OUTSIDE else ask.limit.section
        limit_s = ask.limit.limit_s
        if limit_s < 0 or len(section.encode()) > _NAME_MOST:
            raise RefusalError(
                "422",
                f"a limit of {limit_s:g} s for {section[:_NAME_MOST]!r} cannot be: give seconds "
                f"above 0, or 0 to have it learned, for a name of {_NAME_MOST} bytes at most",
            )
        for _ in range(_ATTEMPTS):
            found, revision = await self._read(ask.job)
            old = found or self._unlearned(ask.job)
            new = configured(old, section, limit_s, self._rules)
            if new != old:
                try:
                    revision = await self._documents.put(ask.job, encode(new), revision=revision)
                except ConflictError:
                    continue
                self._say(old, new, f"{ask.by}: {ask.reason}", revision)
            break
        else:
            raise RefusalError(
                "503", f"others write the limits of {ask.job} all the time: ask again"
            )
        place = f"section {section}" if section else "the time outside all sections"
        said = f"{limit_s:g} s from now on" if limit_s else "learned again"
        return Done(text=f"the limit of {place} is {said}")

    def forget(self, idle_s: float) -> None:
        """Drop jobs that nobody spoke of for so long."""
        before_s = self._clock.now() - idle_s
        for job, lessons in list(self._lessons.items()):
            if lessons.heard_s < before_s:
                del self._lessons[job]

    async def _teach(self, job: str, lessons: Lessons) -> None:
        document, revision = await self._read(job)
        new = lessons.proposed(job, document)
        if new is None:
            return
        revision = await self._documents.put(job, encode(new), revision=revision)
        self._say(document or self._unlearned(job), new, new.reason, revision)

    def _say(self, old: LimitsDocument, new: LimitsDocument, reason: str, revision: int) -> None:
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
        found = await self._documents.get(job)
        if found.data is None:
            return None, 0
        return decode_as(found.data, LimitsDocument), found.revision

    def _unlearned(self, job: str) -> LimitsDocument:
        return LimitsDocument(
            job=job,
            limits=(),
            first_step_limit_s=self._rules.first_step(None),
            reason="nothing was learned yet: the defaults of its agents hold",
        )

    def _of(self, job: str) -> Lessons:
        lessons = self._lessons.get(job)
        if lessons is None:
            lessons = self._lessons[job] = Lessons(self._rules)
        return lessons


def rules_of(settings: LimitSettings) -> LimitRules:
    """What is learned by."""
    return LimitRules(
        factor=settings.factor,
        floor_s=settings.floor_s,
        cap_s=settings.cap_s,
        long_floor_s=settings.long_floor_s,
        long_cap_s=settings.long_cap_s,
        first_step_floor_s=settings.first_step_floor_s,
        first_step_cap_s=settings.first_step_cap_s,
        observations=settings.observations,
    )
