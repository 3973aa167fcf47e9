"""Decides when a round forms, with which nodes, and what it waits for until then."""

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.messages import Member, Option, Replacement, RoundFormed, RoundWaiting, Seat, StandBy
from everstep.messages.base import shared
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import came_of, decide_to, is_open
from everstep_services.rendezvous.domain.ends import (
    NOT_ENOUGH_NODES,
    end_allocation,
    order_save,
    saves_first,
)
from everstep_services.rendezvous.domain.lost_document import may_be_recalled
from everstep_services.rendezvous.domain.network import pair_test
from everstep_services.rendezvous.domain.placement import (
    FIRST_PORT,
    PORTS,
    Candidate,
    World,
    assign,
    assign_elsewhere,
    largest_size,
    obstacle,
)
from everstep_services.rendezvous.domain.replica_placement import arranged
from everstep_services.rendezvous.domain.restart_backoff import settle


def try_form(batch: Batch) -> None:
    """Form the next round if it can form; else report what it waits for, or give up."""
    if not settle(batch):
        return
    batch.timers.start("form", batch.state.doc.round, batch.state.doc.allocation)
    idle = batch.state.in_stage("idle")
    if batch.state.is_left or batch.control.exclusions:
        idle = [seat for seat in idle if may_have_slot(batch, seat)]
    world = world_of(batch)
    is_enough = len(idle) >= min(world.sizes(), default=world.least)
    candidates = _candidates(batch, idle) if is_enough else []
    size = largest_size(candidates, world)
    wait_s = _wait_s(batch, size, world)
    if size and wait_s <= 0:
        if pair_test.begins(batch, candidates, world):
            return
        _form(batch, candidates, size)
        return
    if size:
        batch.wake_in(wait_s)
    wait(batch, {seat.node for seat in idle}, obstacle(candidates, world), size)


def _candidates(batch: Batch, idle: list[Seat]) -> list[Candidate]:
    doubted, suspects = pair_test.doubted(batch), batch.control.acted_suspects
    return [
        candidate_of(seat, is_suspect=seat.node in suspects, is_doubted=seat.node in doubted)
        for seat in idle
    ]


def world_of(batch: Batch) -> World:
    """Return the sizes that this job's rounds may have."""
    spec = batch.state.doc.spec
    if spec.slots_per_group > 1:
        group = spec.slots_per_group
        return World(
            spec.nodes_min, spec.nodes_max, spec.slots_per_unit, group, "replacement group"
        )
    return World(spec.nodes_min, spec.nodes_max, spec.slots_per_unit, spec.slots_per_segment)


def candidate_of(seat: Seat, *, is_suspect: bool = False, is_doubted: bool = False) -> Candidate:
    """Return the candidate of a seat for placement."""
    return Candidate(
        seat.node,
        seat.infra_rank,
        seat.failure_domain,
        seat.place,
        seat.slot,
        is_suspect,
        is_doubted,
    )


def may_have_slot(batch: Batch, seat: Seat) -> bool:
    """Return whether a node may have a slot: it neither leaves nor is excluded."""
    if seat.is_leaving or not batch.control.exclusions:
        return not seat.is_leaving
    is_excluded = batch.control.exclusion(seat.node, batch.now.wall) is not None
    return not (is_excluded and batch.control.enforces("exclude", otherwise=True))


def _wait_s(batch: Batch, size: int, world: World) -> float:
    """Return how long to wait for more than the minimum of nodes; 0 when there are enough."""
    doc = batch.state.doc
    if not size:
        return 0.0
    if may_be_recalled(batch):  # agents that still run the newest round are only late
        batch.timers.start("recalled", doc.round)
        return batch.settings.elastic_wait_s - batch.timers.elapsed("recalled", doc.round)
    if size >= (doc.slots or world.most) or size >= world.most:
        return _first_call_s(batch, world)
    return batch.settings.elastic_wait_s - _enough_for_s(batch)


def _first_call_s(batch: Batch, world: World) -> float:
    """Return the wait before a job's first round: all should be here, to order or measure them."""
    doc = batch.state.doc
    here = batch.state.in_stage("idle")
    is_worth = doc.spec.network_test != "off" or any(seat.infra_rank is not None for seat in here)
    if doc.round or not is_worth or len(here) >= world.most + doc.spec.spares:
        return 0.0
    return batch.settings.last_call_s - _enough_for_s(batch)


def _enough_for_s(batch: Batch) -> float:
    """Return for how long there have been enough nodes for a round."""
    doc = batch.state.doc
    batch.timers.start("enough", doc.round, doc.allocation)
    return batch.timers.elapsed("enough", doc.round, doc.allocation)


def _form(batch: Batch, candidates: list[Candidate], size: int) -> None:
    state, doc = batch.state, batch.state.doc
    before = {seat.slot: seat for seat in state.members}
    domains = {slot: seat.failure_domain for slot, seat in before.items() if slot is not None}
    segment, incident = world_of(batch).segment, doc.incident
    if incident is not None and incident.asks == "move":
        placed = assign_elsewhere(candidates, size, segment, incident.node)
    else:
        placed = assign(candidates, size, segment, domains)
    slots = {node: slot for slot, node in placed.items()}
    # A node that owes an answer keeps its seat, without a slot: its ranks may still run; once
    # they have ended it is a spare.
    seats = [
        replace(seat, slot=slots.get(seat.node), stage=_stage(seat, slots))
        for seat in state.seats
        if seat.stage != "gone"
    ]
    waited_s = batch.timers.elapsed("form", doc.round, doc.allocation)
    state.replace_all(seats)
    incidents.formed(batch)
    came_of(batch, "done", f"{_are_here(size)} after {waited_s:.1f} s", "wait")
    _enter_round(batch, size, {slot: seat.node for slot, seat in before.items()})
    _say_formed(batch, before, waited_s, is_first=not before)
    _order(batch)


def _stage(seat: Seat, slots: dict[str, int]) -> str:
    if seat.node in slots:
        return "starting"
    return "absent" if seat.stage == "stopping" else seat.stage


def _enter_round(batch: Batch, size: int, held: Mapping[int | None, str]) -> None:
    state, doc = batch.state, batch.state.doc
    members = state.members
    first, number = members[0], doc.round + 1
    batch.timers.clear("form", doc.round)
    batch.timers.clear("enough", doc.round)
    state.set(
        round=number,
        slots=size,
        world_size=sum(seat.ranks for seat in members),
        master_address=first.address,
        master_port=first.master_port or FIRST_PORT + number % PORTS,
        start_order=batch.now.new_id(),
        replication=arranged(
            members, doc.replication, batch.settings, batch.now.new_id() + batch.now.new_id()
        ),
        warm_ranks=0,
        has_stepped=False,
        first_step=None,
        restore_s=0.0,
        heal_s=0.0,
        healed="",
        survives=0,
        are_kept=False,
        last_step=max(
            (doc.last_step, doc.round_step), key=lambda step: -1 if step is None else step
        ),
        reached_step=doc.reached_step if doc.round_step is None else doc.round_step,
        round_step=None,
        planned=None,
        saving=None,
        stalls=(),
        checks=(),
        network=None,
    )
    again = f"restart {doc.restarts}" if doc.restarts else "no restart so far"
    if doc.incident is not None and doc.incident.asks == "move":
        stay = any(held.get(seat.slot) == seat.node for seat in members)
        where = "on the same node, for no other is here" if stay else "on other nodes"
        again += f"; its ranks asked to move: they start {where}"
    batch.enter("forming", f"round {number}: {size} {'slot' if size == 1 else 'slots'}, {again}")
    batch.timers.start("lived", number)


def _say_formed(
    batch: Batch, before: dict[int | None, Seat], waited_s: float, *, is_first: bool
) -> None:
    state, doc = batch.state, batch.state.doc
    members = state.members
    replaced = tuple(
        Replacement(
            slot=seat.slot or 0,
            node=seat.node,
            was=before[seat.slot].node,
            reason=_why_replaced(batch, before[seat.slot]),
        )
        for seat in members
        if seat.slot in before and before[seat.slot].node != seat.node
    )
    larger = len(members) - len(before)
    cause = "start" if is_first else "grow" if larger > 0 else "shrink" if larger else "restart"
    batch.record(
        RoundFormed(
            **batch.round_head(),
            members=tuple(
                Member(
                    slot=seat.slot or 0,
                    node=seat.node,
                    first_rank=state.first_rank(seat.node),
                    ranks=seat.ranks,
                )
                for seat in members
            ),
            world_size=doc.world_size,
            waited_s=waited_s,
            allocation=doc.allocation,
            spares=tuple(seat.node for seat in state.in_stage("idle")),
            cause=cause,
            reason=doc.reason,
            replaced=replaced,
            restarts=doc.restarts,
            incident=doc.incident.id if doc.incident else None,
        )
    )


def _why_replaced(batch: Batch, was: Seat) -> str:
    if was.is_leaving:
        return was.leaves_because or f"{was.node} must leave"
    if was.stage == "gone":
        return f"{was.node} is gone"
    if was.stage == "stopping":
        return f"{was.node} did not come back in time"
    incident = batch.state.doc.incident
    if incident is not None and incident.asks == "move":
        return f"its ranks asked for another node: {incident.reason}"
    suspicion = batch.control.suspicion(was.node)
    if suspicion is not None:
        return f"{was.node} is suspect: {suspicion}"
    return f"{was.node} was needed elsewhere"


def _order(batch: Batch) -> None:
    state, doc = batch.state, batch.state.doc
    for seat in state.members:
        batch.send(state.start_order(seat), seat)
    for seat in state.in_stage("idle"):
        stand_by = StandBy(id=doc.start_order, job=doc.job, round=doc.round, reason=doc.reason)
        batch.send(stand_by, seat)


_NAMED_MOST = 100


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The nodes that a round waits for, and the limit."""

    rule: str
    reason: str
    limit_s: float
    joined: int
    needed: int
    missing: tuple[str, ...] = ()


def wait(batch: Batch, here: set[str], stands: str, size: int) -> None:
    """Wait for required or additional nodes, within the limits; `stands` is an obstacle."""
    doc, world = batch.state.doc, world_of(batch)
    waited_s = batch.timers.elapsed("form", doc.round, doc.allocation)
    left_s = batch.join_within_s - waited_s
    missing = tuple(seat.node for seat in batch.state.members if seat.node not in here)
    missing = missing[:_NAMED_MOST]
    needed = min(world.sizes(), default=world.least)
    if left_s <= 0:
        if saves_first(batch):
            return
        names = f"; missing: {', '.join(missing)}" if missing else ""
        end_allocation(
            batch,
            NOT_ENOUGH_NODES,
            f"round {doc.round + 1}: {len(here)} of {needed} nodes joined within "
            f"{batch.join_within_s:g} s{names}. {stands or 'Start their agents'}, or allow fewer "
            f"nodes with --nnodes MIN:MAX",
        )
        return
    batch.wake_in(left_s)
    if doc.phase == "ending":
        batch.enter("joining", doc.reason)
    if size:
        most, within_s = max(world.sizes()), batch.settings.elastic_wait_s
        if size == most and not may_be_recalled(batch):  # the others need not be waited for long
            most, within_s = most + doc.spec.spares, batch.settings.last_call_s
        why = f"{_are_here(len(here))}, and up to {most} are wanted"
        _say_waiting(batch, _Waiting("wait.for_more", why, within_s, len(here), needed))
        return
    if waited_s >= batch.settings.say_waiting_after_s:
        order_save(batch)
    rule = "wait.no_place" if stands else "wait.not_enough_nodes"
    why = stands or f"{len(here)} of {needed} nodes are here"
    waiting = _Waiting(rule, why, batch.join_within_s, len(here), needed, missing)
    _say_waiting(batch, waiting)


def _are_here(count: int) -> str:
    return "1 node is here" if count == 1 else f"{count} nodes are here"


def _say_waiting(batch: Batch, waiting: _Waiting) -> None:
    doc = batch.state.doc
    waited_s = batch.timers.elapsed("form", doc.round, doc.allocation)
    key = f"{','.join(waiting.missing)}|{waiting.rule}|{waiting.needed}"
    if key == doc.waiting:
        return
    if waited_s < batch.settings.say_waiting_after_s:
        batch.wake_in(batch.settings.say_waiting_after_s - waited_s)
        return
    batch.record(
        RoundWaiting(
            **batch.round_head(doc.round + 1),
            **shared(RoundWaiting, waiting),
            waited_s=waited_s,
        )
    )
    _decide_to_wait(batch, waiting)
    names = f"; missing: {', '.join(waiting.missing)}" if waiting.missing else ""
    within = f"waits up to {waiting.limit_s:g} s for round {doc.round + 1}"
    batch.say_waiting(key, f"{within}: {waiting.reason}{names}")


def _decide_to_wait(batch: Batch, waiting: _Waiting) -> None:
    """Record the decision to wait after a loss; the wait for a job's first round is not one."""
    doc = batch.state.doc
    if not doc.round or is_open(batch, "wait"):
        return
    fewer = "a smaller world is formed when the wait is over"
    if waiting.rule != "wait.for_more":
        fewer = f"a round needs at least {waiting.needed} nodes"
    decide_to(
        batch,
        "wait",
        waiting.reason,
        rule=waiting.rule,
        incident=doc.incident.id if doc.incident else None,
        considered=(
            Option(action="shrink", rejected=fewer),
            Option(action="stop", rejected=f"it may wait for {waiting.limit_s:g} s"),
        ),
        nodes_out=waiting.missing,
    )
