"""The observer: hears every beat, asks the domain, records what it finds."""

import asyncio
import logging
from collections import Counter, deque
from itertools import islice

from everstep import subjects
from everstep.bus.errors import SpoolError
from everstep.bus.ports import Bus, Inbox
from everstep.clock import Clock
from everstep.messages import Fact, JobEnded, NodeBeat, NodeLost, NodeReturned
from everstep_services.health.domain import Fleet, Limits
from everstep_services.health.findings import Lost, Returned
from everstep_services.health.settings import HealthSettings

log = logging.getLogger(__name__)

_SOURCE = "health"
_RECORDED_AT_ONCE = 500
_UNRECORDED_MOST = 100_000
_RETRY_S = 1.0


class Observer:
    """One of any number of replicas: all hear the same beats and make the same facts.

    It keeps nothing. A new one knows a node from its first beat on.
    """

    def __init__(self, settings: HealthSettings, bus: Bus, clock: Clock) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._fleet = Fleet(_limits(settings))
        self._beats: Inbox[NodeBeat] | None = None
        self._dropped = 0
        self._unrecorded: deque[Fact] = deque(maxlen=_UNRECORDED_MOST)
        self._has_unrecorded = asyncio.Event()
        self._counts: Counter[str] = Counter()

    def statistics(self) -> dict[str, float]:
        """What it knows and counted so far, for metrics."""
        jobs, nodes, lost = self._fleet.counts()
        return {
            "jobs": float(jobs),
            "nodes": float(nodes),
            "nodes_lost": float(lost),
            "findings_waiting": float(len(self._unrecorded)),
            "blind_seconds_total": self._fleet.blind_s,
            **{
                f"{name}_total": float(self._counts[name]) for name in ("beats", "lost", "returned")
            },
        }

    async def hear_for_ever(self) -> None:
        """Take in every beat of every job."""
        capacity = self._settings.inbox_beats
        async with self._bus.subscribe(subjects.beat(), NodeBeat, capacity=capacity) as beats:
            self._beats = beats
            async for beat in beats:
                self._counts["beats"] += 1
                finding = self._fleet.hear(beat, self._clock.now())
                if finding is not None:
                    self._announce_return(finding)

    async def follow_jobs_for_ever(self) -> None:
        """Hear which jobs are over, so that nobody waits for their nodes."""
        async with self._bus.subscribe(subjects.fact(None, "job_ended"), JobEnded) as ended:
            async for fact in ended:
                self._fleet.end_job(fact.job)

    async def judge_for_ever(self) -> None:
        """Judge every silence, once a tick."""
        while True:
            await self._clock.sleep(self._settings.tick_s)
            for finding in self._fleet.judge(self._clock.now(), is_blind=self._is_blind()):
                self._announce_loss(finding)

    async def record_for_ever(self) -> None:
        """Bring findings onto our disk. While it is full they wait here, the newest of them."""
        while True:
            if not self._unrecorded:
                self._has_unrecorded.clear()
                await self._has_unrecorded.wait()
            batch = list(islice(self._unrecorded, _RECORDED_AT_ONCE))
            trouble = await self._record(batch)
            if trouble is not None:
                log.error("findings_wait count=%d error=%s", len(self._unrecorded), trouble)
                await self._clock.sleep(_RETRY_S)
                continue
            for _ in batch:
                self._unrecorded.popleft()

    async def _record(self, facts: list[Fact]) -> BaseException | None:
        """All or none: a fact that is recorded again is the same fact."""
        trouble: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for fact in facts:
                    tasks.create_task(self._bus.record(fact))
        except* SpoolError as errors:
            trouble = errors.exceptions[0]
        return trouble

    def _is_blind(self) -> bool:
        dropped = 0 if self._beats is None else self._beats.dropped
        missed, self._dropped = dropped - self._dropped, dropped
        return missed > 0 or self._beats is None or not self._bus.connected

    def _announce_loss(self, finding: Lost) -> None:
        beat = finding.beat
        log.warning("node_lost job=%s node=%s reason=%r", beat.job, beat.node, finding.reason)
        self._keep(
            "lost",
            NodeLost(
                id=finding.id,
                job=beat.job,
                at=self._clock.wall(),
                source=_SOURCE,
                round=beat.round,
                node=beat.node,
                silence_s=round(finding.silence_s, 3),
                limit_s=finding.limit_s,
                reason=finding.reason,
                blind_s=round(finding.blind_s, 3),
                slot=beat.slot,
                last_step=finding.last_step,
            ),
        )

    def _announce_return(self, finding: Returned) -> None:
        beat = finding.beat
        log.info("node_returned job=%s node=%s reason=%r", beat.job, beat.node, finding.reason)
        self._keep(
            "returned",
            NodeReturned(
                id=finding.id,
                job=beat.job,
                at=self._clock.wall(),
                source=_SOURCE,
                round=beat.round,
                node=beat.node,
                away_s=round(finding.away_s, 3),
                reason=finding.reason,
                loss=finding.loss,
            ),
        )

    def _keep(self, what: str, fact: Fact) -> None:
        self._counts[what] += 1
        self._unrecorded.append(fact)
        self._has_unrecorded.set()


def _limits(settings: HealthSettings) -> Limits:
    return Limits(
        silence_s=settings.silence_limit_s,
        all_silent_s=settings.all_silent_limit_s,
        reconnect_s=settings.reconnect_grace_s,
        moving_most_s=settings.moving_limit_most_s,
        tick_s=settings.tick_s,
        forget_s=settings.forget_after_s,
    )
