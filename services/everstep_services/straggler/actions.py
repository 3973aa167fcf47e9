"""Carries out what the policy asks for; rendezvous and health decide whether it is possible."""

import asyncio
import logging
from collections import Counter
from functools import partial

from everstep.bus.derived_ids import DerivedIds
from everstep.bus.input_failures import InputFailures
from everstep.bus.policy_requests import PolicyRequests
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import Done, KnownStraggler, StragglerActed
from everstep.messages.base import shared
from everstep_services.straggler.documents import JobDocuments
from everstep_services.straggler.domain.findings import SOURCE
from everstep_services.straggler.domain.policy import ActionOutcome, StragglerDecision
from everstep_services.straggler.jobs import TrackedJob
from everstep_services.straggler.settings import StragglerSettings

log = logging.getLogger(__name__)


class StragglerActions:
    """The replica that claims a decision acts on it: once for each finding and action."""

    def __init__(
        self,
        settings: StragglerSettings,
        bus: Bus,
        clock: Clock,
        documents: JobDocuments,
        ids: DerivedIds,
    ) -> None:
        self._settings = settings
        self._ids = ids
        self._requests = PolicyRequests(bus, clock, SOURCE)
        self._clock = clock
        self._documents = documents
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the policy")

    def statistics(self) -> dict[str, float]:
        """Return the counts so far, for metrics."""
        names: tuple[ActionOutcome, ...] = ("observed", "asked", "refused")
        return {f"actions_{name}_total": float(self._counts[name]) for name in names}

    async def take(self, job: TrackedJob, tasks: asyncio.TaskGroup) -> None:
        """Claim the decisions about a job, and begin to act."""
        decisions, job.decisions = job.decisions, []
        stragglers = {straggler.finding: straggler for straggler in job.stragglers}
        for decision in decisions:
            if (straggler := stragglers.get(decision.finding)) is not None:
                event = f"not_claimed job={job.job} rank={straggler.rank}"
                with self._input_failures.caught("a decision", event):
                    await self._take(job, straggler, decision, tasks)

    async def _take(
        self,
        job: TrackedJob,
        straggler: KnownStraggler,
        decision: StragglerDecision,
        tasks: asyncio.TaskGroup,
    ) -> None:
        lost = "; the replica that was to ask ended before it knew the answer"
        unknown = self._fact(job, straggler, decision, "refused", decision.reason + lost)
        if not await self._documents.claim(job, straggler.finding, decision.action, unknown):
            return
        if decision.mode == "enforce":
            tasks.create_task(
                self._act(job, straggler, decision), name=f"{decision.action}-{job.job}"
            )
        else:
            why = f"{decision.reason}; the mode or the brake allows only to observe"
            await self._say(job, self._fact(job, straggler, decision, "observed", why))

    async def _act(
        self, job: TrackedJob, straggler: KnownStraggler, decision: StragglerDecision
    ) -> None:
        with self._input_failures.caught("an action", f"action_not_recorded job={job.job}"):
            outcome, answer = await self._asked(job, straggler, decision)
            reason = f"{decision.reason}; {answer}"
            await self._say(job, self._fact(job, straggler, decision, outcome, reason))

    async def _asked(
        self, tracked: TrackedJob, straggler: KnownStraggler, decision: StragglerDecision
    ) -> tuple[ActionOutcome, str]:
        """Return the outcome, and the service's answer."""
        job, node = tracked.job, straggler.node
        if decision.action == "exclude" and not tracked.formed.has_seat(straggler.round, node):
            return "refused", f"{node} has no slot in round {straggler.round} of {job}"
        done = await self._requests.answered(job, partial(self._ask, job, node, decision))
        return ("refused" if done.is_refused else "asked"), done.text

    async def _ask(self, job: str, node: str, decision: StragglerDecision) -> Done:
        match decision.action:
            case "stop":
                return await self._requests.stop(job, decision.reason)
            case "exclude":
                within_s = self._settings.drain_within_s
                return await self._requests.replace(
                    job, node, decision.reason, drain_within_s=within_s
                )

    async def _say(self, job: TrackedJob, fact: StragglerActed) -> None:
        self._counts[fact.outcome] += 1
        log.info(
            "straggler_acted job=%s rank=%d action=%s outcome=%s reason=%r",
            job.job, fact.rank, fact.action, fact.outcome, fact.reason,
        )  # fmt: skip
        await self._documents.record(job, (fact,))

    def _fact(
        self,
        job: TrackedJob,
        straggler: KnownStraggler,
        decision: StragglerDecision,
        outcome: ActionOutcome,
        reason: str,
    ) -> StragglerActed:
        return StragglerActed(
            **{**shared(StragglerActed, straggler), "reason": reason},
            id=self._ids.of("acted", straggler.finding, decision.action),
            job=job.job,
            at=self._clock.wall(),
            source=SOURCE,
            action=decision.action,
            outcome=outcome,
        )
