"""Does what the policy asks for: others decide whether that can be."""

import asyncio
import logging
from collections import Counter

from everstep.bus.errors import AskRefusedError, BusError
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.messages import (
    Done,
    DrainNode,
    ExcludeNode,
    KnownStraggler,
    StopJob,
    StragglerActed,
)
from everstep.subjects import CLUSTER
from everstep_services.straggler.documents import JobDocuments
from everstep_services.straggler.domain.findings import SOURCE, fact_id
from everstep_services.straggler.domain.policy import Decision
from everstep_services.straggler.jobs import TrackedJob
from everstep_services.straggler.settings import StragglerSettings

log = logging.getLogger(__name__)

_ASK_S = 4.0
_TRIES = 3
_PAUSE_S = 1.0


class Actions:
    """Whichever replica claims a decision acts on it: once for each finding and action."""

    def __init__(
        self, settings: StragglerSettings, bus: Bus, clock: Clock, documents: JobDocuments
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._documents = documents
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the policy")

    def statistics(self) -> dict[str, float]:
        """What it counted so far, for metrics."""
        names = ("observed", "asked", "refused")
        return {f"actions_{name}_total": float(self._counts[name]) for name in names}

    async def take(self, one: TrackedJob, tasks: asyncio.TaskGroup) -> None:
        """Claim what is decided about a job, and begin with it."""
        decisions, one.decisions = one.decisions, []
        for decision in decisions:
            known = next((it for it in one.found if it.finding == decision.finding), None)
            if known is None:
                continue
            try:
                await self._take(one, known, decision, tasks)
            except (EverstepError, TimeoutError) as error:
                log.warning("not_claimed job=%s rank=%d error=%s", one.job, known.rank, error)
            except Exception as error:  # noqa: BLE001  other jobs are as good as before
                self._input_failures.note("a decision", error)

    async def _take(
        self,
        one: TrackedJob,
        known: KnownStraggler,
        decision: Decision,
        tasks: asyncio.TaskGroup,
    ) -> None:
        lost = "; the replica that was to ask ended before it knew the answer"
        unknown = self._fact(one, known, decision, "refused", decision.reason + lost)
        if not await self._documents.claim(one, known.finding, decision.action, unknown):
            return
        if decision.mode == "enforce":
            tasks.create_task(self._act(one, known, decision), name=f"{decision.action}-{one.job}")
        else:
            why = f"{decision.reason}; the mode or the brake lets it only be observed"
            await self._say(one, self._fact(one, known, decision, "observed", why))

    async def _act(self, one: TrackedJob, known: KnownStraggler, decision: Decision) -> None:
        try:
            outcome, said = await self._asked(one, known, decision)
            reason = f"{decision.reason}; {said}"
            await self._say(one, self._fact(one, known, decision, outcome, reason))
        except (EverstepError, TimeoutError) as error:
            log.warning("action_not_recorded job=%s error=%s", one.job, error)
        except Exception as error:  # noqa: BLE001  the service goes on
            self._input_failures.note("an action", error)

    async def _asked(
        self, one: TrackedJob, known: KnownStraggler, decision: Decision
    ) -> tuple[str, str]:
        """Return the outcome, and the service's answer."""
        job = one.job
        if decision.action == "exclude" and not one.formed.has_seat(known.round, known.node):
            return "refused", f"{known.node} has no slot in round {known.round} of {job}"
        said = ""
        for attempt in range(_TRIES):
            try:
                done = await self._ask(job, known, decision)
            except AskRefusedError as error:
                return "refused", str(error)
            except (BusError, TimeoutError) as error:
                said = str(error)
                log.info("asking_again job=%s attempt=%d error=%s", job, attempt, error)
                await self._clock.sleep(_PAUSE_S)
            else:
                return ("refused" if done.is_refused else "asked"), done.text
        return "refused", f"nobody answered: {said}"

    async def _ask(self, job: str, known: KnownStraggler, decision: Decision) -> Done:
        match decision.action:
            case "stop":
                stop = StopJob(job=job, by=SOURCE, reason=decision.reason, origin="service")
                return await self._rendezvous("stop", job, stop)
            case "exclude":
                return await self._exclude(job, known, decision)

    async def _exclude(self, job: str, known: KnownStraggler, decision: Decision) -> Done:
        """First health, so that the node does not come back as the spare of itself."""
        out = ExcludeNode(
            job=CLUSTER,
            node=known.node,
            by=SOURCE,
            reason=f"{job}: {decision.reason}",
            origin="service",
        )
        excluded = await self._bus.ask("health", "exclude", out, Done, job=CLUSTER, within_s=_ASK_S)
        if excluded.is_refused:
            return excluded
        drain = DrainNode(
            job=job,
            node=known.node,
            by=SOURCE,
            reason=decision.reason,
            within_s=self._settings.drain_within_s,
            origin="service",
        )
        drained = await self._rendezvous("drain", job, drain)
        refused = "it is excluded, and not drained: " if drained.is_refused else ""
        return Done(text=f"{excluded.text}; {refused}{drained.text}")

    async def _rendezvous(self, verb: str, job: str, question: StopJob | DrainNode) -> Done:
        return await self._bus.ask("rendezvous", verb, question, Done, job=job, within_s=_ASK_S)

    async def _say(self, one: TrackedJob, fact: StragglerActed) -> None:
        self._counts[fact.outcome] += 1
        log.info(
            "straggler_acted job=%s rank=%d action=%s outcome=%s reason=%r",
            one.job, fact.rank, fact.action, fact.outcome, fact.reason,
        )  # fmt: skip
        await self._documents.record(one, (fact,))

    def _fact(
        self,
        one: TrackedJob,
        known: KnownStraggler,
        decision: Decision,
        outcome: str,
        reason: str,
    ) -> StragglerActed:
        return StragglerActed(
            id=fact_id("acted", known.finding, decision.action),
            job=one.job,
            at=self._clock.wall(),
            source=SOURCE,
            round=known.round,
            node=known.node,
            rank=known.rank,
            finding=known.finding,
            action=decision.action,
            outcome=outcome,
            reason=reason,
        )
