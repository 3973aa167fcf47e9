"""A round that waits for nodes: tells all agents, records the decision, and gives up in the end."""

from dataclasses import dataclass

from everstep.messages import Option, RoundWaiting
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import decide_to, is_open
from everstep_services.rendezvous.domain.ends import NOT_ENOUGH_NODES, end_allocation
from everstep_services.rendezvous.domain.placement import Candidate, World, obstacle

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


def wait(batch: Batch, candidates: list[Candidate], world: World, size: int) -> None:
    """Wait for required or additional nodes, within the limits."""
    doc = batch.state.doc
    waited_s = batch.timers.elapsed("form", doc.round, doc.allocation)
    left_s = batch.join_within_s - waited_s
    here = {candidate.node for candidate in candidates}
    missing = tuple(seat.node for seat in batch.state.members if seat.node not in here)
    missing = missing[:_NAMED_MOST]
    needed = min(world.sizes(), default=world.least)
    stands = obstacle(candidates, world)
    if left_s <= 0:
        names = f"; missing: {', '.join(missing)}" if missing else ""
        end_allocation(
            batch,
            NOT_ENOUGH_NODES,
            f"round {doc.round + 1}: {len(candidates)} of {needed} nodes joined within "
            f"{batch.join_within_s:g} s{names}. {stands or 'Start their agents'}, or allow fewer "
            f"nodes with --nnodes MIN:MAX",
        )
        return
    batch.wake_in(left_s)
    if doc.phase == "ending":
        batch.enter("joining", doc.reason)
    if size:
        most, within_s = max(world.sizes()), batch.settings.elastic_wait_s
        why = f"{len(candidates)} nodes are here, and up to {most} are wanted"
        _say_waiting(batch, _Waiting("wait.for_more", why, within_s, len(candidates), needed))
        return
    rule = "wait.no_place" if stands else "wait.not_enough_nodes"
    why = stands or f"{len(candidates)} of {needed} nodes are here"
    waiting = _Waiting(rule, why, batch.join_within_s, len(candidates), needed, missing)
    _say_waiting(batch, waiting)


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
            joined=waiting.joined,
            needed=waiting.needed,
            waited_s=waited_s,
            limit_s=waiting.limit_s,
            missing=waiting.missing,
            reason=waiting.reason,
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
