"""The end of a round, an allocation and a job, and the decision between two rounds."""

from typing import Literal

from msgspec.structs import replace

from everstep.incident_causes import CONSEQUENCE, meaning_of
from everstep.messages import (
    AllocationEnded,
    JobEnded,
    JobSpec,
    Option,
    RoundEnded,
)
from everstep.messages.documents.rounds import OpenIncident
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.budgets import (
    CANNOT_START,
    HOUR_S,
    RestartDecision,
    RestartHistory,
    RestartRules,
    RoundFailure,
    judge,
)
from everstep_services.rendezvous.domain.decisions import came_of, decide_to, only_say
from everstep_services.rendezvous.domain.incidents import IncidentOutcome, Sign
from everstep_services.rendezvous.domain.state import AT_WORK, OVER, Phase, with_stage

NOT_ENOUGH_NODES = 92
RETRYABLE = 90
PREEMPTED = 91
JobEnd = Literal["done", "failed", "stopped"]
AllocationEnd = Literal["done", "failed", "preempted", "stopped", "lost"]
_ENDS_WITH: dict[str, AllocationEnd] = {
    "preempted": "preempted",
    "operator": "stopped",
    "done": "done",
    "failed": "failed",
}


def end_round(batch: Batch, sign: Sign) -> None:
    """End the round on every node: its ranks must stop, and another round may follow."""
    state, doc = batch.state, batch.state.doc
    if doc.phase == "forming":
        told = f"round {doc.round} was over before all of its ranks ran: {sign.reason}"
        came_of(batch, "failed", told, "restart")
    opened = None
    if meaning_of(sign.trigger).opens_incident or doc.incident is not None:
        if doc.incident is None:
            opened = incidents.add(batch, sign)
        else:
            incidents.broke_again(batch, sign)
            opened = state.doc.incident
    _say_ended(batch, sign.trigger, sign.reason, opened, sign)
    state.set(stop_order=batch.now.new_id(), planned=None, saving=None, stalls=())
    for seat in state.in_stage(*AT_WORK):
        state.put(with_stage(seat, "stopping" if seat.instance else "gone"))
    batch.enter("ending", sign.reason)
    batch.timers.start("form", doc.round, doc.allocation)
    batch.send(batch.stop_order())


def decide(batch: Batch) -> None:
    """Decide what follows the ended round; once, when all have reported."""
    incident = batch.state.doc.incident
    if incident is None or incident.is_decided:
        return
    if incident.weight <= CONSEQUENCE and batch.state.is_left:
        incident = replace(incident, trigger="preempted")
    failure = _failure(batch, incident)
    rules = RestartRules(
        batch.state.doc.spec,
        batch.settings,
        may_stop=_may_stop(batch, batch.state.doc.spec),
        may_stop_start=batch.control.enforces("stop", otherwise=True),
        is_braked=batch.control.is_braked,
    )
    decision = judge(failure, _past(batch), rules)
    _keep(batch, decision, is_counted=failure.is_counted)
    _say_decided(batch, decision, incident.reason, incident.id, incident.trigger_fact)
    if decision.action == "stop":
        state: JobEnd = "failed" if decision.exit_code == 1 else "stopped"
        batch.state.set(is_mendable=decision.rule == CANNOT_START)
        end_job(batch, state, decision.exit_code, f"{incident.reason}; {decision.reason}")
        return
    batch.state.set(incident=replace(incident, is_decided=True, delay_s=decision.delay_s))
    if decision.delay_s:
        after = f"{decision.backoff}; the last one: {incident.reason}"
        if decision.advice and "stop" not in batch.state.doc.spec.enforce:
            after += "; --stop-on-repeat ends the job instead"
        number = batch.state.doc.round + 1
        batch.say_waiting("backoff", f"waits {decision.delay_s:g} s before round {number}: {after}")


def end_job(batch: Batch, state: JobEnd, exit_code: int, reason: str) -> None:
    """End the job for good, and send all agents away."""
    doc = batch.state.doc
    incident = doc.incident
    came_of(batch, "done", f"every agent has the order to leave with code {exit_code}", "stop")
    if state != "done":
        incidents.close(batch, "failed" if state == "failed" else "stopped", reason, "decide_s")
    reached = [step for step in (doc.last_step, doc.round_step) if step is not None]
    batch.record(
        JobEnded(
            **batch.head(),
            state=state,
            exit_code=exit_code,
            reason=reason,
            last_step=max(reached, default=None),
            rounds=doc.round,
            incident=incident.id if incident else None,
        )
    )
    _send_away(batch, "done" if state == "done" else "stopped", exit_code, reason)


def end_allocation(batch: Batch, exit_code: int, reason: str) -> None:
    """End the allocation; the job may continue in another one."""
    came_of(batch, "failed", reason)
    incidents.close(batch, "failed", reason, "rendezvous_s")
    _send_away(batch, "stopped", exit_code, reason)


def end_preempted(batch: Batch, reason: str) -> None:
    """End the allocation whose nodes are all taken away; the job continues in another one."""
    incident = batch.state.doc.incident
    _say_ended(batch, "preempted", reason, incident)
    incidents.close(batch, "preempted", reason, "other_s")
    _send_away(batch, "stopped", PREEMPTED, reason)


def finish(batch: Batch) -> None:
    """End the job: every rank of the round has exited with 0."""
    doc = batch.state.doc
    came_of(batch, "done", "every rank has finished")
    incidents.close(batch, "recovered", "every rank has finished", "first_step_s")
    reason = f"every rank of round {doc.round} exited with 0"
    _say_ended(batch, "done", reason, None)
    end_job(batch, "done", 0, reason)


def close_allocations(batch: Batch, cause: str, reason: str, exit_code: int | None) -> None:
    """Record the end of each allocation without agents."""
    doc = batch.state.doc
    here = {seat.allocation for seat in batch.state.seats if seat.stage != "gone"}
    for allocation in doc.allocations:
        if allocation in here:
            continue
        over = doc.phase in OVER
        batch.record(
            AllocationEnded(
                **batch.head(),
                allocation=allocation,
                state=_allocation_state(batch, cause),
                reason=doc.reason if over else reason,
                exit_code=doc.exit_code if over else exit_code,
            )
        )
    left = tuple(name for name in doc.allocations if name in here)
    if left != doc.allocations:
        batch.state.set(allocations=left)
    if not here and doc.phase not in OVER:
        _abandoned(batch, cause, reason)


def _allocation_state(batch: Batch, cause: str) -> AllocationEnd:
    doc = batch.state.doc
    if doc.phase == "done":
        return "done"
    states: dict[int, AllocationEnd] = {
        1: "failed",
        NOT_ENOUGH_NODES: "failed",
        PREEMPTED: "preempted",
        93: "stopped",
    }
    if doc.phase == "stopped" and doc.exit_code in states:
        return states[doc.exit_code]
    return _ENDS_WITH.get(cause, "lost")


def _abandoned(batch: Batch, cause: str, reason: str) -> None:
    """End an allocation whose agents have all left before the job was over."""
    doc = batch.state.doc
    exit_code = PREEMPTED if cause == "preempted" else RETRYABLE
    outcome: IncidentOutcome = "preempted" if cause == "preempted" else "stopped"
    if doc.phase in {"forming", "running"}:
        _say_ended(batch, cause, reason, doc.incident)
    incidents.close(batch, outcome, f"no agent is left: {reason}", "other_s")
    _send_away(batch, "stopped", exit_code, f"no agent is left: {reason}")


def _send_away(batch: Batch, phase: Phase, exit_code: int, reason: str) -> None:
    state = batch.state
    came_of(batch, "overtaken", reason)
    state.set(exit_code=exit_code, stop_order=batch.now.new_id())
    state.set(planned=None, saving=None, stalls=())
    for seat in [seat for seat in state.seats if seat.stage == "gone" or not seat.instance]:
        state.drop(seat.node)
    for seat in state.in_stage(*AT_WORK):
        state.put(with_stage(seat, "stopping"))
    batch.enter(phase, reason)
    batch.send(batch.leave_order())


def _failure(batch: Batch, incident: OpenIncident) -> RoundFailure:
    doc = batch.state.doc
    lived = batch.timers.started_at("lived", doc.round)
    stepping = batch.timers.started_at("stepping", doc.round)
    ended = batch.timers.started_at("phase", doc.round, "ending") or batch.now.s
    return RoundFailure(
        cause=incident.trigger,
        lived_s=0.0 if lived is None else max(ended - lived, 0.0),
        steps_s=0.0 if stepping is None else max(ended - stepping, 0.0),
        step=doc.round_step,
        fingerprint=incident.fingerprint,
        exit_code=incident.exit_code,
        is_of_code=incident.is_of_code,
        is_on_all_ranks=batch.are_all_alike,
        has_ever_stepped=doc.has_ever_stepped or doc.last_step is not None,
    )


def _past(batch: Batch) -> RestartHistory:
    doc = batch.state.doc
    return RestartHistory(
        restarts=doc.restarts,
        refilled=doc.refilled,
        recent=len(recent(batch)),
        quick_failures=doc.quick_failures,
        idle_rounds=doc.idle_rounds,
        best_step=doc.last_step,
        fingerprints=doc.fingerprints,
    )


def recent(batch: Batch) -> tuple[int, ...]:
    """Return the restarts that may lie within the last hour; one of unknown age may."""
    return tuple(
        number
        for number in batch.state.doc.recent
        if batch.timers.elapsed("restart", batch.state.doc.job, number) < HOUR_S
    )


def _keep(batch: Batch, decision: RestartDecision, *, is_counted: bool) -> None:
    past = decision.past
    is_restart = decision.action == "restart" and is_counted
    doc = batch.state.doc
    latest = recent(batch)
    if is_restart:
        latest = (*latest, past.restarts)
        batch.timers.start("restart", doc.job, past.restarts)
    batch.state.set(
        restarts=past.restarts if is_restart else doc.restarts,
        recent=latest,
        refilled=past.refilled,
        quick_failures=past.quick_failures,
        idle_rounds=past.idle_rounds,
        last_step=past.best_step,
        fingerprints=past.fingerprints,
        budgets=decision.budgets,
    )


def _say_ended(
    batch: Batch,
    cause: str,
    reason: str,
    incident: OpenIncident | None,
    sign: Sign | None = None,
) -> None:
    doc = batch.state.doc
    lived = batch.timers.started_at("lived", doc.round)
    batch.record(
        RoundEnded(
            **batch.round_head(),
            cause=cause,
            reason=reason,
            lasted_s=None if lived is None else batch.now.s - lived,
            first_step=doc.first_step,
            last_step=doc.round_step,
            node=sign.node if sign else None,
            rank=sign.rank if sign else None,
            incident=incident.id if incident else None,
            trigger=sign.fact if sign else None,
        )
    )


def _say_decided(
    batch: Batch, decision: RestartDecision, reason: str, incident: str, trigger_fact: str | None
) -> None:
    doc = batch.state.doc
    gone = tuple(seat.node for seat in batch.state.in_stage("gone"))[:100]
    took_s = batch.timers.elapsed("phase", doc.round, "ending")
    if decision.advice:
        only_say(
            batch,
            "stop",
            decision.advice,
            rule=decision.advice_rule,
            incident=incident,
            evidence=(trigger_fact,) if trigger_fact else (),
            considered=(Option(action="restart", rejected="it is likely to fail again"),),
            budgets=decision.budgets,
            took_s=took_s,
        )
    decide_to(
        batch,
        decision.action,
        f"{reason}; {decision.reason}",
        rule=decision.rule,
        incident=incident,
        evidence=(trigger_fact,) if trigger_fact else (),
        missing=decision.missing,
        considered=decision.considered,
        budgets=decision.budgets,
        nodes_out=gone,
        delay_s=decision.delay_s,
        took_s=took_s,
    )


def _may_stop(batch: Batch, spec: JobSpec) -> bool:
    return batch.control.enforces("stop", otherwise="stop" in spec.enforce)
