"""Receives the timings of all jobs, has them judged, and follows which ranks are slow."""

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from everstep import subjects
from everstep.bus.derived_ids import DerivedIds
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus, Inbox
from everstep.clock import Clock
from everstep.messages import (
    AllocationEnded,
    FaultInjected,
    HeatMapDrawn,
    HeatMapPart,
    JobEnded,
    NodeTimings,
    RoundFormed,
    ShowHeatMap,
)
from everstep_services.straggler.actions import StragglerActions
from everstep_services.straggler.documents import JobDocuments
from everstep_services.straggler.domain.findings import SOURCE
from everstep_services.straggler.jobs import Jobs, TrackedJob
from everstep_services.straggler.judgements import Judge, JudgementRunner
from everstep_services.straggler.rank_report import report_lines
from everstep_services.straggler.settings import StragglerSettings

log = logging.getLogger(__name__)

_ROUNDS_MOST = 256
_RANKS_A_PART, _PARTS_MOST = 1024, 128
_WINDOWS_DRAWN, _WINDOWS_OF_MANY = 100, 20
_GAUGES = tuple(
    f"{name}_{of}"
    for name in ("own_seconds", "ratio", "waited_seconds")
    for of in ("min", "median", "max")
)
_SUMS = ("windows", "slow_ranks", "missing_ranks")


class Observer:
    """One of any number of replicas: all receive the same timings and judge them alike."""

    def __init__(  # noqa: PLR0913  each is a part that it drives
        self,
        settings: StragglerSettings,
        bus: Bus,
        clock: Clock,
        jobs: Jobs,
        *,
        documents: JobDocuments,
        actions: StragglerActions,
        judgements: JudgementRunner,
        ids: DerivedIds,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._jobs = jobs
        self._documents = documents
        self._actions = actions
        self._judgements = judgements
        self._ids = ids
        self._inbox: Inbox[NodeTimings] | None = None
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._input_failures = InputFailures("the observer")

    def statistics(self) -> dict[str, float]:
        """Return gauges and counts so far, for metrics."""
        summaries = [job.snapshot.summary for job in self._jobs]
        refused = sum((job.refused for job in self._jobs), self._refused + self._jobs.refused)
        inbox = self._inbox
        return {
            "jobs": float(len(self._jobs)),
            "open_findings": float(sum(len(job.document.found) for job in self._jobs)),
            **{name: sum(summary.get(name, 0.0) for summary in summaries) for name in _SUMS},
            **{name: _together(name, summaries) for name in _GAUGES},
            "messages_total": float(self._counts["messages"]),
            "messages_dropped_total": float(0 if inbox is None else inbox.dropped),
            "refused_total": float(refused.total()),
            "input_failures_total": float(
                self._input_failures.failures + self._judgements.failures
            ),
        }

    async def hear_for_ever(self) -> None:
        """Take in the windows of every node of every job."""
        capacity = self._settings.inbox_windows
        async with self._bus.subscribe(subjects.timing(), NodeTimings, capacity=capacity) as inbox:
            self._inbox = inbox
            async for timings in inbox:
                self._counts["messages"] += 1
                with self._input_failures.caught("a window"):
                    self._hear(timings)

    async def follow_jobs_for_ever(self) -> None:
        """Follow which jobs are over: their ranks are no longer slow."""
        subject = subjects.fact(None, "job_ended")
        async with self._bus.subscribe(subject, JobEnded) as ended, asyncio.TaskGroup() as tasks:
            async for fact in ended:
                with self._input_failures.caught("the end of a job"):
                    job = self._jobs.get(fact.job)
                    if job is not None:
                        job.ended_at = self._clock.now()
                        self._end(job, "its job ended")
                        tasks.create_task(self._draw(job), name=f"picture-{job.job}")

    async def follow_allocations_for_ever(self) -> None:
        """Keep the last picture of a job that no agent runs any more: others may continue it."""
        subject = subjects.fact(None, "allocation_ended")
        async with (
            self._bus.subscribe(subject, AllocationEnded) as ends,
            asyncio.TaskGroup() as tasks,
        ):
            async for fact in ends:
                if job := self._jobs.get(fact.job):
                    tasks.create_task(self._draw(job), name=f"picture-{job.job}")

    async def follow_rounds_for_ever(self) -> None:
        """Follow formed rounds. Agents may report them, too; the document of rendezvous decides."""
        formed = subjects.fact(None, "round_formed")
        async with self._bus.subscribe(formed, RoundFormed, capacity=_ROUNDS_MOST) as rounds:
            async for fact in rounds:
                job = self._jobs.get(fact.job)
                if job is not None and fact.round is not None:
                    job.expect(fact.round)

    async def follow_faults_for_ever(self) -> None:
        """Follow which ranks somebody makes slow on purpose."""
        injected = subjects.fact(None, "fault_injected")
        async with self._bus.subscribe(injected, FaultInjected) as faults:
            async for fault in faults:
                with self._input_failures.caught("a fault made on purpose"):
                    now = self._clock.now()
                    if job := self._jobs.track(fault.job, now):
                        job.faults.note(fault, now)

    async def judge_for_ever(self) -> None:
        """Judge the windows that are complete or overdue, once a tick."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._clock.sleep(self._settings.tick_s)
                for job in self._jobs:
                    self._judge(job, tasks)

    async def write_for_ever(self) -> None:
        """Write changed documents, and carry out what the policy asks for, once a tick."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._clock.sleep(self._settings.tick_s)
                await self._bus.wait_connected()
                for job in self._jobs:
                    await self._documents.settle(job)
                    with self._input_failures.caught("the policy"):
                        self._apply_policy(job)
                    await self._actions.take(job, tasks)

    async def report_for_ever(self) -> None:
        """Log the best and worst ranks of the jobs that send timings."""
        every_s = self._settings.report_every_s
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._clock.sleep(every_s or 3600.0)
                for job in self._jobs if every_s else ():
                    if self._clock.now() - job.heard_at < every_s:
                        tasks.create_task(self._report(job), name=f"report-{job.job}")

    def _hear(self, timings: NodeTimings) -> None:
        now = self._clock.now()
        job = self._jobs.track(timings.job, now)
        if job is None:
            self._refused["too many jobs"] += 1
        else:
            job.hear(timings, now)

    def _judge(self, job: TrackedJob, tasks: asyncio.TaskGroup) -> None:
        now = self._clock.now()
        if job.is_primed and job.work.is_due(now):
            self._judgements.begin(job, tasks)
        silent_s = now - job.heard_at
        if silent_s >= self._settings.forget_after_s and not job.is_gone:
            self._end(job, f"its job has sent nothing for {silent_s / 3600:.1f} h")

    def _end(self, job: TrackedJob, reason: str) -> None:
        job.end(reason)
        job.is_gone = True

    def _apply_policy(self, job: TrackedJob) -> None:
        if not (job.is_primed and job.stragglers and job.work.has_news):
            return
        job.work.has_news = False
        snapshot, now = job.snapshot, self._clock.now()
        job.policy.report(
            job.stragglers, snapshot.slower_ratios, snapshot.window, job.switches, now
        )
        job.decisions.extend(job.policy.due(job.stragglers, job.switches, now))

    async def _draw(self, job: TrackedJob) -> None:
        """Record the last picture of a job, which is then kept without us."""
        with self._input_failures.caught("a picture", f"picture_not_recorded job={job.job}"):
            parts = await self._judgements.ask_of_past(job, lambda judge: _parts(job.job, judge))
            for part in parts:
                await self._bus.record(self._drawn(job, part))

    def _drawn(self, job: TrackedJob, part: HeatMapPart) -> HeatMapDrawn:
        return HeatMapDrawn(
            id=self._ids.of(
                "picture", job.job, str(part.round), str(part.windows[-1]), str(part.first_rank)
            ),
            job=job.job, at=self._clock.wall(), source=SOURCE, round=part.round,
            windows=part.windows, first_rank=part.first_rank,
            nodes=tuple((run.node, run.ranks) for run in part.nodes),
            low=part.low, high=part.high, cells=part.cells, is_by_time=job.is_by_time,
        )  # fmt: skip

    async def _report(self, job: TrackedJob) -> None:
        most = self._settings.report_ranks

        def lines(judge: Judge) -> list[str]:
            return list(report_lines(judge.scores(10**9, ""), most))

        with self._input_failures.caught("a report"):
            for line in await self._judgements.ask(job, lines):
                log.info("rank_report job=%s %s", job.job, line)


def _parts(job: str, judge: Judge) -> list[HeatMapPart]:
    """The picture of the last windows, fewer of them where there are many ranks."""
    parts: list[HeatMapPart] = []
    first: int | None = 0
    while first is not None and len(parts) < _PARTS_MOST:
        windows = _WINDOWS_DRAWN if len(parts) == 0 else len(parts[0].windows)
        question = ShowHeatMap(job=job, first_rank=first, most_windows=windows)
        part = judge.heat_map_part(question, _RANKS_A_PART)
        if part.next_rank is not None and windows > _WINDOWS_OF_MANY:
            question = replace(question, most_windows=_WINDOWS_OF_MANY)
            part = judge.heat_map_part(question, _RANKS_A_PART)
        if not part.windows:
            break
        parts.append(part)
        first = part.next_rank
    return parts


def _together(name: str, summaries: Iterable[Mapping[str, float]]) -> float:
    """A gauge over all jobs: the least, the most, or the median of the jobs'."""
    values = [summary[name] for summary in summaries if name in summary]
    if not values:
        return 0.0
    if name.endswith("min"):
        return min(values)
    return max(values) if name.endswith("max") else statistics.median(values)
