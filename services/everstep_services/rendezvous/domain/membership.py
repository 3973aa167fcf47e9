"""Agents that come, come back, and go."""

from msgspec.structs import replace

from everstep.incident_causes import IncidentCause
from everstep.messages import (
    AllocationStarted,
    AwaitRound,
    Done,
    JobChanged,
    JobStarted,
    Join,
    Joined,
    Leave,
    NodeJoined,
    NodeLeft,
    Seat,
    StandBy,
    StartRanks,
    StopRanks,
)
from everstep.messages.base import shared
from everstep_services.rendezvous.domain import agreed_save
from everstep_services.rendezvous.domain.admission import (
    Refusal,
    changed_fields,
    ends_soon,
    given_up,
    job_over,
    record_refused,
    record_tolerated,
    refusal,
    reopens,
)
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.ends import PREEMPTED, close_allocations
from everstep_services.rendezvous.domain.events import LivenessProbe
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.liveness import fell_away, member_lost
from everstep_services.rendezvous.domain.lost_document import (
    end_other_world,
    is_adoptable,
    look_for_failure,
    may_be_recalled,
    recall,
    resume,
)
from everstep_services.rendezvous.domain.network import pair_test
from everstep_services.rendezvous.domain.requests import dismissal
from everstep_services.rendezvous.domain.state import AT_WORK, OVER, with_stage

_CHECKING_S = 0.2
_NEEDED_LATER_S = 2.0
_ALIVE_FOR_S = 2.0
_ONE_BY_ONE = frozenset({"none", "kubernetes"})


def join(batch: Batch, ask: Join) -> Refusal | None:
    """Admit an agent, or return why not. `answer` makes the answer after the batch is decided."""
    state = batch.state
    if state.doc.phase in OVER and not _reopened(batch, ask):
        return job_over(batch)
    ask = _in_its_allocation(batch, ask)
    recall(batch, ask)
    no = _not_the_only_one(batch, ask) or _known_job(batch, ask) or _outlived(batch, ask)
    if no is None:
        _take(batch, ask)
        if batch.timers.is_running("unfit", ask.instance):
            batch.timers.clear("unfit", ask.instance)
        record_tolerated(batch, ask)
        return None
    seat = state.seat(ask.node)
    if not ends_soon(no.cause):
        record_refused(batch, ask, no)
        if seat is not None and seat.instance == ask.instance:
            fell_away(batch, seat, Sign("node_left", no.reason, node=seat.node))
    return given_up(batch, ask, no)


def answer(batch: Batch, ask: Join, no: Refusal | None) -> Joined:
    """Return the answer to a join, once the whole batch is decided."""
    doc, seat = batch.state.doc, batch.state.seat(ask.node)
    if no is not None:
        order = batch.stop_order() if no.cause == "stale" else None
        return Joined(
            **shared(Joined, no),
            round=doc.round,
            is_accepted=False,
            standing="waiting" if ends_soon(no.cause) else "refused",
            order=order,
        )
    if seat is None or doc.phase in OVER:
        exit_code = doc.exit_code if doc.phase in OVER else None
        return Joined(round=doc.round, is_accepted=True, reason=doc.reason, exit_code=exit_code)
    if seat.is_leaving and seat.stage == "idle":
        code, reason = dismissal(batch, seat)
        return Joined(
            round=doc.round, is_accepted=True, reason=reason, standing="leaving", exit_code=code
        )
    is_member = seat.slot is not None and doc.phase in {"forming", "running", "ending"}
    is_spare = seat.slot is None and doc.phase in {"forming", "running"}
    given = batch.order_for(seat) if seat.stage == "stopping" or is_member or is_spare else None
    waits = seat.stage == "idle" and is_member
    told: StartRanks | StopRanks | StandBy | AwaitRound | None = batch.await_order()
    if isinstance(given, StartRanks | StopRanks | StandBy) and not waits:
        told = given
    return Joined(
        round=doc.round,
        is_accepted=True,
        reason=doc.reason,
        standing="member" if is_member and not waits else "spare" if is_spare else "waiting",
        slot=seat.slot if is_member else None,
        order=told,
    )


def leave(batch: Batch, ask: Leave) -> Done:
    """Remove an agent that leaves by itself."""
    seat = batch.state.seat(ask.node)
    if seat is None or seat.instance != ask.instance:
        return Done(text="it had left already")
    batch.record(NodeLeft(**{**shared(NodeLeft, ask), **batch.head()}, slot=seat.slot))
    agreed_save.left(batch, seat, ask)
    if seat.slot is not None:
        _went_on(batch, ask.round, ask.last_step)
    seat = batch.state.seat(ask.node) or seat
    cause: IncidentCause = "preempted" if ask.cause == "preempted" else "node_left"
    fell_away(batch, seat, Sign(cause, f"{ask.node} left: {ask.reason}", node=ask.node))
    exit_code = ask.exit_code if ask.exit_code is not None else PREEMPTED
    close_allocations(batch, ask.cause, f"{ask.node} left last: {ask.reason}", exit_code)
    return Done(text="goodbye")


def begin(batch: Batch, ask: Join) -> None:
    """Begin the job with its first agent."""
    batch.record(
        JobStarted(
            **batch.head(),
            spec=ask.spec,
            world_size=ask.spec.nodes_max * ask.spec.ranks_per_node,
            allocation=ask.allocation,
            version=batch.version,
        )
    )


def _in_its_allocation(batch: Batch, ask: Join) -> Join:
    """Put an agent whose allocation has an id of its own into that of the agents present.

    Agents that a person started have one, and pods, which Kubernetes replaces one by one.
    """
    doc = batch.state.doc
    if ask.allocation == doc.allocation or ask.scheduler not in _ONE_BY_ONE:
        return ask
    if not doc.allocations or not batch.state.present:
        return ask
    return replace(ask, allocation=doc.allocation)


def _reopened(batch: Batch, ask: Join) -> bool:
    if not reopens(batch, ask):
        return False
    state, before = batch.state, batch.state.doc
    for seat in list(state.seats):
        state.drop(seat.node)
    close_allocations(batch, "lost", "another allocation took the job over", None)
    state.set(
        spec=ask.spec,
        allocation=ask.allocation,
        exit_code=None,
        is_mendable=False,
        restarts=0,
        refilled=0,
        recent=(),
        quick_failures=0,
        idle_rounds=0,
        budgets=(),
        fingerprints=(),
        incident=None,
    )
    batch.enter("joining", "another allocation goes on with the job")
    batch.timers.clear("restart", before.job)
    changed = changed_fields(before.spec, ask.spec)
    if changed:
        batch.record(
            JobChanged(**batch.head(), spec=ask.spec, changed=changed, allocation=ask.allocation)
        )
    return True


def _not_the_only_one(batch: Batch, ask: Join) -> Refusal | None:
    """Probe the other agent with this node id, and refuse this one if that is still there."""
    seat = batch.state.seat(ask.node)
    if seat is None or seat.instance == ask.instance or seat.stage == "gone":
        return None
    if not seat.instance:
        reason = f"the ranks of {ask.node} have finished: it is needed again if others fail"
        return Refusal("duplicate", reason, retry_after_s=_NEEDED_LATER_S)
    if not batch.timers.is_running("rival", seat.instance, ask.instance):
        # An earlier answer does not count: that agent may have died since.
        batch.memory.answered.pop(seat.instance, None)
        batch.timers.start("rival", seat.instance, ask.instance)
    answered = batch.memory.answered.get(seat.instance)
    if answered is not None and batch.now.s - answered < _ALIVE_FOR_S:
        reason = (
            f"another agent runs as {ask.node} (at {seat.address}): give each its own --node-id, "
            f"or stop the other agent"
        )
        no = Refusal("duplicate", reason, exit_code=2)
        record_refused(batch, ask, no)
        return no
    batch.probes.append(LivenessProbe(ask.node, seat.instance, batch.order_for(seat)))
    reason = f"asking whether the agent that ran as {ask.node} before is still there"
    return Refusal("duplicate", reason, retry_after_s=_CHECKING_S)


def _known_job(batch: Batch, ask: Join) -> Refusal | None:
    """Let a later allocation change the job, if no agent of the earlier one is left."""
    state, doc = batch.state, batch.state.doc
    alone = all(seat.stage == "gone" or seat.node == ask.node for seat in state.seats)
    if ask.allocation not in doc.allocations and doc.allocations and not alone:
        return refusal(batch, ask)
    changed = changed_fields(doc.spec, ask.spec)
    if alone and ask.allocation != doc.allocation and changed:
        batch.record(
            JobChanged(**batch.head(), spec=ask.spec, changed=changed, allocation=ask.allocation)
        )
        state.set(spec=ask.spec)
    return refusal(batch, ask)


def _outlived(batch: Batch, ask: Join) -> Refusal | None:
    """Refuse an agent whose ranks' round is over, or whose slot another node has now."""
    doc, seat = batch.state.doc, batch.state.seat(ask.node)
    running = ask.running_round
    if running is None:
        return None
    if running > doc.round:
        return None  # it knows a newer round than we do: our document was lost
    if (
        running == doc.round
        and seat is None
        and (may_be_recalled(batch) or is_adoptable(batch, ask))
    ):
        return None
    is_its_own = seat is not None and seat.instance == ask.instance and seat.slot is not None
    if running == doc.round and is_its_own and seat is not None and seat.stage != "absent":
        return None
    text = f"round {running} goes on without {ask.node}, or is over: stop its ranks and join again"
    return Refusal("stale", text, retry_after_s=_CHECKING_S)


def _take(batch: Batch, ask: Join) -> None:
    """Give an agent a seat; a node that had a slot keeps it."""
    state = batch.state
    pair_test.told(batch, ask)
    _allocation(batch, ask)
    end_other_world(batch, ask)
    before = state.seat(ask.node)
    is_new = before is None or before.instance != ask.instance
    if before is not None and not is_new:
        _rejoin(batch, ask, before)
        before = state.seat(ask.node)
    if is_new:
        resume(batch, ask)
    is_adopted = is_new and is_adoptable(batch, ask)
    slot, stage = _adopted_seat(ask) if is_adopted else _seat_place(ask, before)
    leaving = before if before is not None and not is_new and before.is_leaving else None
    seat = Seat(
        **shared(Seat, ask),
        slot=slot,
        place=_place(ask),
        stage=stage,
        is_leaving=leaving is not None,
        leaves_because=leaving.leaves_because if leaving else "",
    )
    state.put(seat)
    if state.doc.phase in {"joining", "ending"}:
        batch.timers.start("form", state.doc.round, state.doc.allocation)
    if is_new:
        _say_joined(batch, ask)
    if is_adopted:
        look_for_failure(batch, ask, seat)


def _place(ask: Join) -> str:
    """Return where a node is in the network: as people or the scheduler say, else by its NVLink."""
    if ask.group or ask.topology or ask.failure_domain:
        return ask.group or "/".join(ask.topology)
    return ask.nvlink_domain


def _adopted_seat(ask: Join) -> tuple[int | None, str]:
    assert ask.running is not None
    return ask.running.slot, "finished" if ask.running_state == "finished" else "running"


def _seat_place(ask: Join, before: Seat | None) -> tuple[int | None, str]:
    """Return its slot and stage. Ranks that have no slot in the newest round must stop."""
    if before is not None and before.stage != "gone":
        return before.slot, before.stage
    slot = None if before is None else before.slot
    return slot, "idle" if ask.running is None else "stopping"


def _went_on(batch: Batch, number: int | None, step: int | None) -> None:
    """Ranks of a round went on until they were stopped."""
    doc = batch.state.doc
    if number == doc.round and (step or -1) > (doc.round_step or -1):
        batch.state.set(round_step=step)


def _rejoin(batch: Batch, ask: Join, seat: Seat) -> None:
    """Act on another join of the same agent."""
    doc = batch.state.doc
    if ask.running is not None:
        _finished_meanwhile(batch, ask, seat)
        return
    if seat.stage in {"stopping", "absent"}:
        _went_on(batch, ask.last_round, ask.last_step)
        incident = doc.incident
        if incident is not None:
            batch.state.set(
                incident=replace(
                    incident,
                    evidence_s=max(incident.evidence_s, ask.evidence_s),
                    stop_s=max(incident.stop_s, ask.stop_s),
                )
            )
        batch.state.put(with_stage(seat, "idle"))
    elif seat.stage in AT_WORK and ask.last_round == doc.round:
        # It had ranks of this round, and reports none any more. Without `running` its question
        # may merely be older than its ranks.
        reason = f"{ask.node} no longer runs any rank of round {doc.round}"
        batch.state.put(with_stage(seat, "stopping"))
        member_lost(batch, seat, Sign("rank_exited", reason, node=ask.node))
        batch.state.put(with_stage(seat, "idle"))


def _finished_meanwhile(batch: Batch, ask: Join, seat: Seat) -> None:
    """Note ranks that have finished: that report may have come while no document knew the node."""
    doc = batch.state.doc
    if ask.running_state != "finished" or seat.stage not in {"starting", "running"}:
        return
    if ask.running is not None and (ask.running.round, ask.running.slot) == (doc.round, seat.slot):
        batch.state.put(with_stage(seat, "finished"))


def _allocation(batch: Batch, ask: Join) -> None:
    doc = batch.state.doc
    if ask.allocation in doc.allocations:
        return
    if not doc.allocations:
        batch.state.set(allocation=ask.allocation)
    batch.state.set(allocations=(*doc.allocations, ask.allocation))
    batch.record(
        AllocationStarted(
            **{**shared(AllocationStarted, ask), **batch.head()},
            config_fingerprint=ask.spec.config_fingerprint,
        )
    )


def _say_joined(batch: Batch, ask: Join) -> None:
    batch.record(NodeJoined(**{**shared(NodeJoined, ask), **batch.head()}))
