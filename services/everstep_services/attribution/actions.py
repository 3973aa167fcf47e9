"""Carries out what the policy asks for; rendezvous and health decide whether it is possible.

A decision is written into the incident's case before anything is asked, and its outcome after the
answer. A replica that takes over, or starts again, reads the decision there and does not ask again:
a decision without an outcome is reported as failed, because its outcome is unknown.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from everstep.bus.derived_ids import DerivedIds
from everstep.bus.input_failures import InputFailures
from everstep.bus.policy_requests import WITHIN_S, PolicyRequests
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.messages import (
    ActionDecided,
    ActionTaken,
    Case,
    ControlDocument,
    Done,
    PastIncident,
    PolicyAct,
    RoundDocument,
    ShowRound,
    VerdictReached,
)
from everstep.messages.codec import BadMessageError, decode_as
from everstep.subjects import CLUSTER
from everstep_services.attribution.cases import CaseKeeper
from everstep_services.attribution.domain.case_facts import JobCases
from everstep_services.attribution.domain.policy import (
    ActOutcome,
    Decision,
    PolicySwitches,
    due,
    in_force,
)
from everstep_services.attribution.domain.verdicts import SOURCE, VerdictContext

log = logging.getLogger(__name__)

_WAITING_MOST = 256
_UNKNOWN = "the service ended before it had an answer, and does not ask again"


class VerdictActions:
    """Takes verdicts one after the other; each rule acts once for an incident."""

    def __init__(
        self, default: PolicySwitches, keeper: CaseKeeper, bus: Bus, clock: Clock, ids: DerivedIds
    ) -> None:
        self._default = default
        self._ids = ids
        self._keeper = keeper
        self._bus = bus
        self._requests = PolicyRequests(bus, clock, SOURCE)
        self._clock = clock
        self._verdicts = asyncio.Queue[tuple[VerdictReached, int | None, Sequence[PastIncident]]](
            _WAITING_MOST
        )
        self._under_way = ""
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the policy")

    def statistics(self) -> dict[str, float]:
        """Return the counts so far, for metrics."""
        names = ("observed", "done", "failed")
        return {f"actions_{name}_total": float(self._counts[name]) for name in names}

    def consider(
        self, verdict: VerdictReached, step: int | None, past: Sequence[PastIncident]
    ) -> None:
        """Queue a new verdict for the rules, without waiting."""
        if self._verdicts.full():
            log.warning("not_considered job=%s incident=%s", verdict.job, verdict.incident)
        else:
            self._verdicts.put_nowait((verdict, step, past))

    async def act_for_ever(self) -> None:
        """Carry out what the rules ask for, until cancelled."""
        while True:
            verdict, step, past = await self._verdicts.get()
            try:
                await self._ids.known()
                await self._bus.wait_connected()
                switches = await self._switches(verdict.job)
                for decision in due(verdict, step, past, switches):
                    await self._take(verdict, decision)
            except (EverstepError, TimeoutError) as error:
                log.warning("not_acted incident=%s error=%s", verdict.incident, error)
            except Exception as error:  # noqa: BLE001  other verdicts are considered as before
                self._input_failures.note("a verdict", error)

    async def _switches(self, job: str) -> PolicySwitches:
        documents = self._bus.documents("CONTROL")
        switches = []
        for key in (CLUSTER, job):
            document = await documents.get(key)
            try:
                switches.append(
                    None if document.data is None else decode_as(document.data, ControlDocument)
                )
            except BadMessageError as error:
                log.warning("switches_not_read key=%s error=%s", key, error)
        return in_force(self._default, *switches)

    async def close_unfinished(self, cases: Iterable[Case]) -> None:
        """Report decisions that an earlier leader has left without an outcome."""
        await self._ids.known()
        for case in list(cases):
            for act in case.acts:
                if not act.is_over and act.decision != self._under_way:
                    await self._conclude(case.job, case.incident, act, "failed", _UNKNOWN)

    async def _take(self, verdict: VerdictReached, decision: Decision) -> None:
        decided = self._decided(verdict, decision)
        act = PolicyAct(decision=decided.id, action=decided.action)
        self._under_way = decided.id
        try:
            if not await self._keeper.change(verdict.job, partial(_begun, decided, act)):
                return
            if decision.mode == "enforce":
                outcome, reason = await self._asked(verdict, decision)
            else:
                outcome, reason = "observed", "its switch or the brake allows only to observe"
            await self._conclude(verdict.job, verdict.incident, act, outcome, reason)
        finally:
            self._under_way = ""

    async def _conclude(
        self, job: str, incident: str, act: PolicyAct, outcome: ActOutcome, reason: str
    ) -> None:
        self._counts[outcome] += 1
        log.info(
            "policy_acted job=%s incident=%s action=%s outcome=%s reason=%r",
            job, incident, act.action, outcome, reason,
        )  # fmt: skip

        def deed(cases: JobCases, now: VerdictContext) -> tuple[None, tuple[ActionTaken, ...]]:
            case = cases.case(incident)
            if case is None or act not in case.acts:
                return None, ()
            over = replace(act, is_over=True)
            acts = tuple(over if other == act else other for other in case.acts)
            cases.amend(replace(case, acts=acts))
            taken = ActionTaken(
                id=self._ids.of(SOURCE, job, act.decision, "taken"), job=job, at=now.wall,
                source=SOURCE, round=case.round, decision=act.decision, action=act.action,
                outcome=outcome, reason=reason, incident=incident,
            )  # fmt: skip
            return None, (taken,)

        await self._keeper.change(job, deed)

    async def _asked(self, verdict: VerdictReached, decision: Decision) -> tuple[ActOutcome, str]:
        """Return the outcome, and the service's answer."""
        job = verdict.job
        done = await self._requests.answered(job, partial(self._ask, job, decision))
        return ("failed" if done.is_refused else "done"), done.text

    async def _ask(self, job: str, decision: Decision) -> Done:
        if decision.node is None:
            done = await self._requests.stop(job, decision.reason)
            return await self._stopped_before(job) or done if done.is_refused else done
        document = await self._bus.ask(
            "rendezvous", "show", ShowRound(job=job), RoundDocument, job=job, within_s=WITHIN_S
        )
        why_not = _cannot_replace(document, decision.node)
        if why_not:
            return Done(text=why_not, is_refused=True)
        return await self._requests.replace(job, decision.node, decision.reason)

    async def _stopped_before(self, job: str) -> Done | None:
        """The answer if the policy itself has stopped the job: the request may be a repetition."""
        document = await self._bus.ask(
            "rendezvous", "show", ShowRound(job=job), RoundDocument, job=job, within_s=WITHIN_S
        )
        if document.phase == "stopped" and document.reason.startswith(f"{SOURCE} "):
            return Done(text="the job is stopped already, as it was asked for before")
        return None

    def _decided(self, verdict: VerdictReached, decision: Decision) -> ActionDecided:
        """The same id for the same decision, whichever replica makes it, and how often."""
        parts = (verdict.incident, decision.rule, decision.node or "")
        return ActionDecided(
            id=self._ids.of(SOURCE, verdict.job, *parts),
            job=verdict.job,
            at=self._clock.wall(),
            source=SOURCE,
            round=verdict.round,
            action=decision.action,
            reason=decision.reason,
            rule=decision.rule,
            mode=decision.mode,
            incident=verdict.incident,
            evidence=(verdict.id,),
            nodes_out=() if decision.node is None else (decision.node,),
        )


def _begun(
    decided: ActionDecided, act: PolicyAct, cases: JobCases, now: VerdictContext
) -> tuple[bool, tuple[ActionDecided, ...]]:
    """Write down a decision; False if it was made before, or its incident is forgotten."""
    del now
    case = cases.case(decided.incident or "")
    if case is None or any(other.decision == act.decision for other in case.acts):
        return False, ()
    cases.amend(replace(case, acts=(*case.acts, act)))
    return True, (decided,)


def _cannot_replace(document: RoundDocument, node: str) -> str:
    """Why rendezvous is not asked; empty if a spare can take over."""
    here = [seat for seat in document.seats if seat.stage != "gone" and not seat.is_leaving]
    if node not in {seat.node for seat in here}:
        return f"{node} no longer takes part in the job"
    size = document.spec.slots_per_group
    if size > 1:
        place = next(seat.place for seat in here if seat.node == node)
        groups = Counter(seat.place for seat in here if seat.place != place)
        room = sum(count - count % size for count in groups.values())
        if room < document.slots:
            return (
                f"no spare group stands by: {room} nodes are in other whole groups, and "
                f"{document.slots} are needed"
            )
        return ""
    if len(here) <= document.slots:
        return f"no spare stands by: {len(here)} nodes are there, and {document.slots} are needed"
    return ""
