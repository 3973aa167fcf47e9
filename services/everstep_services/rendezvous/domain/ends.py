"""The end of a round, of an allocation and of a job."""

from typing import Literal

from everstep.incident_causes import meaning_of
from everstep.incident_outcomes import IncidentOutcome
from everstep.messages import (
    AllocationEnded,
    JobEnded,
    RoundEnded,
    SaveParked,
    Seat,
)
from everstep.messages.documents.rounds import OpenIncident
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import came_of
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.placement import FIRST_PORT, PORTS
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


def end_round(batch: Batch, sign: Sign, *, keeps: bool = False) -> None:
    """End the round on every node: its ranks must stop, and another round may follow.

    With `keeps`, ranks that survive rounds are parked, whatever the cause.

    A stop of the job that was ordered outlives the round, whatever ends it.
    """
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
    state.set(stop_order=batch.now.new_id(), end_reason=sign.reason, are_kept=keeps)
    state.set(planned=doc.planned if state.ordered_stop else None)
    state.set(saving=None, stalls=(), checks=())
    for seat in state.in_stage(*AT_WORK):
        state.put(with_stage(seat, "stopping" if seat.instance else "gone"))
    batch.enter("ending", sign.reason)
    batch.timers.start("form", doc.round, doc.allocation)
    batch.send(batch.stop_order())


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


def saves_first(batch: Batch) -> bool:
    """Whether the end of the job must wait for the save; the first call orders it."""
    doc, grace_s = batch.state.doc, batch.state.doc.spec.stop_grace_s
    if not _unsaved(batch) or not grace_s:
        return False
    owing_s = grace_s + batch.settings.last_call_s - batch.phase_s
    if batch.state.count("stopping") and owing_s > 0:
        batch.wake_in(owing_s)
        return True
    order_save(batch)
    # for the save, for the end of ranks that are late, and for the agents' answers
    within_s = 2 * grace_s + batch.settings.last_call_s
    left_s = within_s - batch.timers.elapsed("saving_parked", doc.round)
    if left_s > 0:
        batch.wake_in(left_s)
    return left_s > 0


def order_save(batch: Batch) -> None:
    """Have all ranks that are parked save together, once after each round."""
    doc, seats = batch.state.doc, _unsaved(batch)
    if not seats or batch.timers.is_running("saving_parked", doc.round):
        return
    batch.timers.start("saving_parked", doc.round)
    counts = [batch.memory.unsaved[seat.instance] for seat in seats]
    for number, seat in enumerate(seats):
        order = SaveParked(
            **batch.order_head(batch.now.new_id()),
            reason=f"perhaps no round follows round {doc.round}",
            first_rank=sum(counts[:number]),
            world_size=sum(counts),
            master_address=seats[0].address,
            master_port=seats[0].master_port or FIRST_PORT + doc.round % PORTS,
            within_s=doc.spec.stop_grace_s,
            grace_s=doc.spec.stop_grace_s,
        )
        batch.send(order, seat)


def _unsaved(batch: Batch) -> list[Seat]:
    """The nodes whose parked ranks have not saved their states, in the order of their slots."""
    unsaved = batch.memory.unsaved
    return [
        seat
        for seat in batch.state.members
        if seat.stage == "idle" and not seat.is_leaving and unsaved.get(seat.instance)
    ]


def end_preempted(batch: Batch, reason: str) -> None:
    """End the allocation whose nodes are all taken away; the job continues in another one."""
    incident = batch.state.doc.incident
    _say_ended(batch, "preempted", reason, incident)
    incidents.close(batch, "preempted", reason, "other_s")
    _send_away(batch, "stopped", PREEMPTED, reason)


def finish(batch: Batch) -> None:
    """End the job: every rank of the round has exited with 0."""
    doc = batch.state.doc
    reason = f"every rank of round {doc.round} exited with 0"
    came_of(batch, "done", "every rank has finished")
    # without a step that was seen, nobody knows how much of this time the training took
    incidents.close(batch, "recovered", reason, "other_s")
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
    stop = batch.state.ordered_stop
    if stop is not None:
        end_job(batch, "stopped", *stop)
        return
    incidents.close(batch, outcome, f"no agent is left: {reason}", "other_s")
    _send_away(batch, "stopped", exit_code, f"no agent is left: {reason}")


def _send_away(batch: Batch, phase: Phase, exit_code: int, reason: str) -> None:
    state = batch.state
    came_of(batch, "overtaken", reason)
    state.set(exit_code=exit_code, stop_order=batch.now.new_id())
    state.set(planned=None, saving=None, stalls=(), checks=(), network=None)
    for seat in [seat for seat in state.seats if seat.stage == "gone" or not seat.instance]:
        state.drop(seat.node)
    for seat in state.in_stage(*AT_WORK):
        state.put(with_stage(seat, "stopping"))
    batch.enter(phase, reason)
    batch.send(batch.leave_order())


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
            trigger=sign.trigger_fact if sign else None,
        )
    )
