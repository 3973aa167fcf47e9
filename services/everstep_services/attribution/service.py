"""Follows incidents, and has each one judged when it is due; nothing waits for a verdict."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.bus.errors import BusError
from everstep.bus.input_failures import InputFailures
from everstep.bus.leader_election import Term, lead_for_ever
from everstep.bus.ports import Bus
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.messages import Case, CorrectVerdict, VerdictCorrected, VerdictReached
from everstep_services.attribution.actions import VerdictActions
from everstep_services.attribution.cases import CaseKeeper
from everstep_services.attribution.domain.case_facts import JobCases
from everstep_services.attribution.domain.combiner import CaseJudgement, combine
from everstep_services.attribution.domain.verdicts import (
    NOT_EXPLAINED,
    VerdictContext,
    concluded,
    corrected,
    unknown_culprits,
)
from everstep_services.attribution.examiner import Examiner
from everstep_services.attribution.explainer import Explainer
from everstep_services.attribution.settings import AttributionSettings

log = logging.getLogger(__name__)

_LEASE = "attribution"
_BATCH = 1000
_FETCH_S = 0.2
_WRITE_EVERY_S = 0.5
_POSITION_EVERY_S = 10.0
_FORGET_EVERY_S = 3600.0
_EXPLAINED_MOST = 32
_TRIES = 3
"""An analysis that fails so often ends with a verdict that nothing is known."""
_WAITS_MOST = 10


@dataclass(slots=True)
class WatchedIncident:
    """One incident that awaits its verdict or a revision. Times are by our own clock."""

    since: float
    changed_at: float
    is_running: bool = False
    is_late: bool = False
    """An analyzer was not done in time: it gets more time."""
    failures: int = 0
    """Analyses that failed, one after the other."""


class Attribution:
    """One of any number of replicas; the one with the lease judges."""

    def __init__(  # noqa: PLR0913  each is a part of its own
        self,
        settings: AttributionSettings,
        bus: Bus,
        clock: Clock,
        keeper: CaseKeeper,
        examiner: Examiner,
        explainer: Explainer,
        actions: VerdictActions,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._keeper = keeper
        self._examiner = examiner
        self._explainer = explainer
        self._actions = actions
        self._watches: dict[tuple[str, str], WatchedIncident] = {}
        self._counts: Counter[str] = Counter()
        self._to_explain = asyncio.Queue[VerdictReached](_EXPLAINED_MOST)
        self._took_s = 0.0
        self._input_failures = InputFailures("attribution")

    def statistics(self) -> dict[str, float]:
        """Return gauges and counts so far, for metrics."""
        totals = ("verdicts", "amended", "inconclusive", "corrections", "confirmations")
        reads = ("facts_read", "facts_missed", "conflicts")
        return {
            "leading": float(self._keeper.leads),
            "jobs": float(len(self._keeper)),
            "open_incidents": float(sum(1 for _ in self._keeper.open_cases())),
            "waiting": float(len(self._watches)),
            "verdict_seconds": self._took_s,
            **{f"{name}_total": float(self._counts[name]) for name in totals},
            **{f"{name}_total": float(self._keeper.counts[name]) for name in reads},
            "facts_not_believed_total": float(self._keeper.not_believed),
            "left_out_total": float(self._examiner.left_out),
            "analyzer_failures_total": float(self._examiner.runner.failures),
            "explanations_total": float(self._explainer.made),
            "explanation_failures_total": float(self._explainer.failures),
            "input_failures_total": float(self._input_failures.failures + self._keeper.failures),
        }

    async def work_for_ever(self) -> None:
        """Whenever the lease is free, take it and judge; survive the bus."""
        await lead_for_ever(self._bus, self._clock, _LEASE, self._lead)

    async def _lead(self, term: Term) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._read_on(term, tasks)
        except* (EverstepError, TimeoutError) as group:
            raise group.exceptions[0] from None
        finally:
            self._keeper.end()
            self._watches.clear()

    async def _read_on(self, term: Term, tasks: asyncio.TaskGroup) -> None:
        position = await self._keeper.begin()
        written = forgotten = news = self._clock.now()
        overdue = self._clock.now() - self._settings.first_within_s
        for case in self._keeper.unjudged():  # an earlier term has waited for their evidence
            self._watches[case.job, case.incident] = WatchedIncident(overdue, overdue)
        async with self._bus.facts(position) as reader:
            while True:
                batch = await reader.fetch(_BATCH, _FETCH_S)
                await self._keeper.take(batch, self._note)
                if not self._keeper.leads and len(batch.facts) < _BATCH:
                    self._keeper.leads = True
                    await self._actions.close_unfinished(self._keeper.all_cases())
                now = self._clock.now()
                if now - news >= _WRITE_EVERY_S:
                    await self._keeper.write_news()
                    news = now
                if batch.position != position and now - written >= _POSITION_EVERY_S:
                    await self._keeper.write_position(batch.position)
                    position, written = batch.position, now
                if now - forgotten >= _FORGET_EVERY_S:
                    await self._keeper.forget_old()
                    forgotten = now
                if self._keeper.leads:
                    self._begin_due(tasks)
                await term.renew()

    def _note(self, job: str, incident: str) -> None:
        """Note that a case has changed, and needs a verdict or a revision."""
        now = self._clock.now()
        watch = self._watches.setdefault(
            (job, incident), WatchedIncident(since=now, changed_at=now)
        )
        watch.changed_at = now

    def _begin_due(self, tasks: asyncio.TaskGroup) -> None:
        """Begin analyses: of jobs that have none under way first, then in the order of reports."""
        running = Counter(key[0] for key, watch in self._watches.items() if watch.is_running)
        due = list(self._due())
        while due and running.total() < self._settings.at_once:
            case, watch = min(due, key=lambda entry: running[entry[0].job])
            due.remove((case, watch))
            running[case.job] += 1
            watch.is_running = True
            tasks.create_task(self._judge(case, watch), name=f"judge-{case.incident}")

    def _due(self) -> Iterator[tuple[Case, WatchedIncident]]:
        now = self._clock.now()
        for (job, incident), watch in list(self._watches.items()):
            case = self._keeper.case(job, incident)
            if watch.is_running:
                continue
            if case is None or case.correction is not None:
                del self._watches[job, incident]
            elif is_due(case, watch, now, self._settings):
                yield case, watch

    async def _judge(self, case: Case, watch: WatchedIncident) -> None:
        began = watch.changed_at
        settings = self._settings
        within_s = settings.analyzer_longest_s if watch.is_late else settings.analyzer_within_s
        try:
            judged, is_partial = await self._examined(case, watch, within_s)
            verdict = await self._conclude(case, judged)
            if verdict is not None:
                self._actions.consider(verdict, case.step, self._keeper.history.past)
        except (EverstepError, TimeoutError) as error:
            log.warning("not_judged job=%s incident=%s error=%s", case.job, case.incident, error)
        except Exception as error:  # noqa: BLE001  other incidents are judged as before
            self._input_failures.note(f"incident {case.incident}", error)
        else:
            self._is_judged(case, watch, began, is_partial=is_partial)
            return
        self._wait_again(case, watch)

    async def _examined(
        self, case: Case, watch: WatchedIncident, within_s: float
    ) -> tuple[CaseJudgement, bool]:
        """The judgement of a case; that nothing is known, if its analysis fails again and again."""
        try:
            return await self._examiner.examine(case, self._keeper.history, within_s)
        except (BusError, TimeoutError):
            raise  # no verdict could be recorded, either
        except Exception as error:
            if watch.failures < _TRIES - 1:
                raise
            self._input_failures.note(f"incident {case.incident}", error)
            why = f"the analysis failed {_TRIES} times: {type(error).__name__}: {error}"
            return combine(case, (), (why,)), False

    def _wait_again(self, case: Case, watch: WatchedIncident) -> None:
        """Let other incidents go first: the bus may be away, or this case cannot be read."""
        watch.failures += 1
        wait_s = self._settings.again_after_s * min(watch.failures, _WAITS_MOST)
        watch.is_running, watch.changed_at = False, self._clock.now() + wait_s
        watch.since = watch.changed_at - self._settings.first_within_s
        self._watches.pop((case.job, case.incident), None)
        self._watches[case.job, case.incident] = watch

    def _is_judged(
        self, case: Case, watch: WatchedIncident, began: float, *, is_partial: bool
    ) -> None:
        watch.is_running, watch.failures = False, 0
        if is_partial and not watch.is_late:
            watch.is_late, watch.changed_at = True, self._clock.now()
        elif watch.changed_at == began:
            self._watches.pop((case.job, case.incident), None)

    async def _conclude(self, case: Case, judged: CaseJudgement) -> VerdictReached | None:
        """Record the verdict, if it differs from the last one."""

        def deed(
            cases: JobCases, now: VerdictContext
        ) -> tuple[VerdictReached | None, tuple[VerdictReached, ...]]:
            newest = cases.case(case.incident)
            if newest is None or newest.outcome == "merged":  # another incident has its verdict
                return None, ()
            verdict = concluded(newest, judged, now)
            if verdict is None:
                return None, ()
            cases.amend(replace(newest, verdict=verdict))
            return verdict, (verdict,)

        verdict = await self._keeper.change(case.job, deed)
        if verdict is not None:
            self._tell(verdict)
            if self._explainer.is_on and not self._to_explain.full():
                self._to_explain.put_nowait(verdict)
        return verdict

    async def explain_for_ever(self) -> None:
        """Have verdicts put into words, one after the other, if that is switched on."""
        while True:
            verdict = await self._to_explain.get()
            try:
                await self._explain(verdict)
            except (EverstepError, TimeoutError) as error:
                log.warning("not_explained incident=%s error=%s", verdict.incident, error)
            except Exception as error:  # noqa: BLE001  verdicts are reached as before
                self._input_failures.note("an explanation", error)

    async def _explain(self, verdict: VerdictReached) -> None:
        """Record a revision with the same verdict and an explanation, or why there is none."""
        text, failure = await self._explainer.explain(verdict)
        if not text and not failure:
            return
        lacks = (f"{NOT_EXPLAINED}: {failure}",) if failure else ()

        def deed(cases: JobCases, now: VerdictContext) -> tuple[None, tuple[VerdictReached, ...]]:
            newest = cases.case(verdict.incident)
            if newest is None or newest.verdict is None or newest.verdict.id != verdict.id:
                return None, ()
            explained = replace(
                verdict, id=now.new_id(), at=now.wall, revision=verdict.revision + 1,
                explanation=text, missing=(*lacks, *verdict.missing),
            )  # fmt: skip
            cases.amend(replace(newest, verdict=explained))
            return None, (explained,)

        await self._keeper.change(verdict.job, deed)

    def _tell(self, verdict: VerdictReached) -> None:
        self._counts["verdicts"] += 1
        self._counts["amended"] += verdict.revision > 0
        self._counts["inconclusive"] += verdict.is_inconclusive
        if verdict.revision == 0:
            self._took_s = verdict.took_s
        log.info(
            "verdict_reached job=%s incident=%s revision=%d cause=%s confidence=%.2f ranks=%s "
            "nodes=%s advice=%s reason=%r",
            verdict.job, verdict.incident, verdict.revision, verdict.cause, verdict.confidence,
            list(verdict.culprit_ranks[:8]), list(verdict.culprit_nodes[:8]), verdict.advice,
            verdict.reason,
        )  # fmt: skip

    # --- what people ask ---

    async def correct(self, ask: CorrectVerdict) -> VerdictCorrected | None:
        """Record a person's correction; None if the incident is not remembered."""

        def deed(
            cases: JobCases, now: VerdictContext
        ) -> tuple[VerdictCorrected | None, tuple[VerdictCorrected | VerdictReached, ...]]:
            case = cases.case(ask.incident)
            if case is None:
                return None, ()
            if problem := unknown_culprits(case, ask):
                raise RefusalError("422", problem)
            correction, verdict = corrected(case, ask, now)
            cases.amend(replace(case, verdict=verdict, correction=correction))
            return correction, (correction, verdict)

        correction = await self._keeper.change(ask.job, deed)
        if correction is not None:
            self._counts["corrections"] += 1
            self._counts["confirmations"] += correction.is_confirmation
            log.info(
                "verdict_corrected job=%s incident=%s by=%s was=%s is=%s",
                ask.job, ask.incident, ask.by, correction.was_cause, correction.cause,
            )  # fmt: skip
        return correction


def is_due(case: Case, watch: WatchedIncident, now: float, settings: AttributionSettings) -> bool:
    """Whether a case must be judged now."""
    quiet_s = now - watch.changed_at
    if case.outcome == "merged":
        return False
    if case.verdict is not None:
        has_ended_again = case.last_round > case.round and not case.outcome and is_complete(case)
        return quiet_s >= (settings.quiet_s if has_ended_again else settings.again_after_s)
    if now - watch.since >= settings.first_within_s:
        return True
    return quiet_s >= settings.quiet_s and is_complete(case)


def is_complete(case: Case) -> bool:
    """Whether all nodes have stopped their ranks, or are gone: their evidence is complete."""
    if case.outcome:
        return True
    if not case.trigger:
        return False
    gone = {sign.node for sign in case.nodes if sign.sign in {"lost", "left"}}
    last = max(case.round, case.last_round)
    ended = Counter(end.node for end in case.ends if end.round == last)
    return bool(case.members) and all(
        member.node in case.stopped or member.node in gone or ended[member.node] >= member.ranks
        for member in case.members
    )
