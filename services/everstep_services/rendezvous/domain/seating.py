"""An agent gets a seat, or comes back to the one that it has."""

from msgspec.structs import replace

from everstep.messages import AllocationStarted, Join, NodeJoined, Seat
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.losses import member_lost
from everstep_services.rendezvous.domain.state import AT_WORK
from everstep_services.rendezvous.domain.turn import Turn


def take(turn: Turn, ask: Join) -> None:
    """Let an agent take part; an old acquaintance keeps its slot."""
    state, before = turn.state, turn.state.seat(ask.node)
    is_new = before is None or before.instance != ask.instance
    _allocation(turn, ask)
    if before is not None and not is_new:
        _back(turn, ask, before)
        before = state.seat(ask.node)
    slot = stage = None
    if before is not None:
        slot = before.slot
        stage = "idle" if is_new else before.stage
        if before.stage == "gone":  # it was taken for lost, and is not
            stage = "idle" if ask.running_round is None else "stopping"
    adopted = _adopted(turn, ask) if is_new else None
    # Ranks of which we know nothing are left alone; their agent has no slot until they are gone.
    fallback = "idle" if ask.running_round is None else "absent"
    state.put(
        Seat(
            node=ask.node,
            slot=slot if adopted is None else adopted,
            ranks=ask.ranks,
            address=ask.address,
            infra_rank=ask.infra_rank,
            place="/".join(ask.topology),
            last_slot=ask.last_slot,
            replica_port=ask.replica_port,
            warm=ask.warm,
            stage="running" if adopted is not None else stage or fallback,
            instance=ask.instance,
            allocation=ask.allocation,
            failure_domain=ask.failure_domain,
            master_port=ask.master_port,
            is_leaving=before is not None and not is_new and before.is_leaving,
        )
    )
    if state.doc.phase in {"joining", "ending"}:
        turn.since("form", state.doc.round, state.doc.allocation)
    if is_new:
        _say_joined(turn, ask)


def _back(turn: Turn, ask: Join, seat: Seat) -> None:
    """The same agent asks again."""
    doc = turn.state.doc
    if ask.running_round is not None:
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


def _adopted(turn: Turn, ask: Join) -> int | None:
    """Our document was lost while a round ran: the round goes on, agents tell us who is in it."""
    state, doc = turn.state, turn.state.doc
    known = max(ask.last_round or 0, ask.running_round or 0)
    if known > doc.round and not state.count(*AT_WORK):
        state.set(round=known)
        if ask.running_round == known:
            size = ask.spec.nodes_max
            state.set(slots=size, world_size=size * ask.spec.ranks_per_node, has_stepped=True)
            state.enter("running", "its agents say so: the document was lost", turn.now.wall)
    is_its_own = ask.running_round == state.doc.round and is_adoptable(turn, ask)
    return ask.last_slot if is_its_own else None


def is_adoptable(turn: Turn, ask: Join) -> bool:
    """The round that it runs has a slot of which we know no holder, and it says that it has it."""
    state, doc = turn.state, turn.state.doc
    if ask.last_slot is None or doc.phase != "running" or ask.last_slot >= doc.slots:
        return False
    return all(seat.slot != ask.last_slot for seat in state.seats)


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
