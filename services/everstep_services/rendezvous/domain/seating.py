"""An agent gets a seat, or comes back to the one that it has."""

from msgspec.structs import replace

from everstep.messages import AllocationStarted, Join, NodeJoined, Seat
from everstep_services.rendezvous.domain.batch import Turn
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.liveness import member_lost
from everstep_services.rendezvous.domain.recovery import is_adoptable, look_for_failure, resume
from everstep_services.rendezvous.domain.state import AT_WORK


def take(turn: Turn, ask: Join) -> None:
    """Let an agent take part; an old acquaintance keeps its slot."""
    state, before = turn.state, turn.state.seat(ask.node)
    is_new = before is None or before.instance != ask.instance
    _allocation(turn, ask)
    if before is not None and not is_new:
        _back(turn, ask, before)
        before = state.seat(ask.node)
    if is_new:
        resume(turn, ask)
    is_adopted = is_new and is_adoptable(turn, ask)
    slot, stage = _adopted(ask) if is_adopted else _place(ask, before)
    seat = Seat(
        node=ask.node,
        slot=slot,
        ranks=ask.ranks,
        address=ask.address,
        infra_rank=ask.infra_rank,
        place="/".join(ask.topology),
        last_slot=ask.last_slot,
        replica_port=ask.replica_port,
        warm=ask.warm,
        stage=stage,
        instance=ask.instance,
        allocation=ask.allocation,
        failure_domain=ask.failure_domain,
        master_port=ask.master_port,
        is_leaving=before is not None and not is_new and before.is_leaving,
    )
    state.put(seat)
    if state.doc.phase in {"joining", "ending"}:
        turn.since("form", state.doc.round, state.doc.allocation)
    if is_new:
        _say_joined(turn, ask)
    if is_adopted:
        look_for_failure(turn, ask, seat)


def _adopted(ask: Join) -> tuple[int | None, str]:
    assert ask.running is not None
    return ask.running.slot, "finished" if ask.running_state == "finished" else "running"


def _place(ask: Join, before: Seat | None) -> tuple[int | None, str]:
    """Its slot and its stage. Ranks without a place in the newest round are to be stopped."""
    if before is not None and before.stage != "gone":
        return before.slot, before.stage
    slot = None if before is None else before.slot
    return slot, "idle" if ask.running is None else "stopping"


def _back(turn: Turn, ask: Join, seat: Seat) -> None:
    """The same agent asks again."""
    doc = turn.state.doc
    if ask.running is not None:
        return
    if seat.stage in {"stopping", "absent"}:
        incident = doc.incident
        if incident is not None:
            turn.state.set(
                incident=replace(
                    incident,
                    evidence_s=max(incident.evidence_s, ask.evidence_s),
                    stop_s=max(incident.stop_s, ask.stop_s),
                )
            )
        turn.state.put(replace(seat, stage="idle"))
    elif seat.stage in AT_WORK and ask.last_round == doc.round:
        # It had ranks of this round, and has none any more. One that does not say so may merely
        # be late: its question can be older than its ranks.
        reason = f"{ask.node} no longer runs any rank of round {doc.round}"
        turn.state.put(replace(seat, stage="stopping"))
        member_lost(turn, seat, Sign("rank_exited", reason, node=ask.node))
        turn.state.put(replace(seat, stage="idle"))


def _allocation(turn: Turn, ask: Join) -> None:
    doc = turn.state.doc
    if ask.allocation in doc.allocations:
        return
    if not doc.allocations:
        turn.state.set(allocation=ask.allocation)
    turn.state.set(allocations=(*doc.allocations, ask.allocation))
    turn.fact(
        AllocationStarted,
        allocation=ask.allocation,
        scheduler=ask.scheduler,
        scheduler_job=ask.scheduler_job,
        attempt=ask.attempt,
        config_fingerprint=ask.spec.config_fingerprint,
    )


def _say_joined(turn: Turn, ask: Join) -> None:
    turn.fact(
        NodeJoined,
        node=ask.node,
        allocation=ask.allocation,
        ranks=ask.ranks,
        address=ask.address,
        infra_rank=ask.infra_rank,
        failure_domain=ask.failure_domain,
        topology=ask.topology,
        last_round=ask.last_round,
        warm=ask.warm,
        device=ask.device,
        version=ask.version,
    )
