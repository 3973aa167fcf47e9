"""Rebuilds a lost document of a job from the reports of its agents, whose ranks run on."""

from everstep.messages import Join, Replication, Seat
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.ends import end_round
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.liveness import member_lost
from everstep_services.rendezvous.domain.state import AT_WORK


def recall(batch: Batch, ask: Join) -> None:
    """Take over the newest round that an agent knows, whether or not it may take part."""
    if newest_known(ask) > batch.state.doc.round and not batch.state.count(*AT_WORK):
        _go_to_round(batch, newest_known(ask))


def end_other_world(batch: Batch, ask: Join) -> None:
    """End the round if this agent knows another world: of two worlds neither continues.

    The other world has a newer round, or the same round by another order. The agent itself may
    have made this one: its late question, older than its ranks, may have begun the document.
    """
    doc, newest = batch.state.doc, newest_known(ask)
    if newest > doc.round:
        difference = f"knows round {newest}, and the document has none after {doc.round}"
    elif _runs_other_order(batch, ask):
        difference = f"runs round {doc.round} by another order than that of the document"
    else:
        return
    reason = f"{ask.node} {difference}: an earlier document was lost, and a job has only one world"
    end_round(batch, Sign("document_lost", reason))
    _go_to_round(batch, newest)


def _runs_other_order(batch: Batch, ask: Join) -> bool:
    doc, running = batch.state.doc, ask.running
    if running is None or doc.phase not in {"forming", "running"}:
        return False
    return running.round == doc.round and running.id != doc.start_order


def resume(batch: Batch, ask: Join) -> None:
    """Continue the newest round if this agent runs it."""
    if ask.running_round == batch.state.doc.round and may_be_recalled(batch):
        _go_on(batch, ask)


def newest_known(ask: Join) -> int:
    """Return the newest round that this agent knows."""
    return max(ask.known_round, ask.last_round or 0, ask.running_round or 0)


def may_be_recalled(batch: Batch) -> bool:
    """Whether agents may still report the newest round's members, which no document has."""
    doc = batch.state.doc
    return doc.phase == "joining" and doc.round > 0 and not doc.start_order


def is_adoptable(batch: Batch, ask: Join) -> bool:
    """Whether the agent reports a slot of the running round that has no known holder."""
    doc, running = batch.state.doc, ask.running
    if running is None or doc.phase != "running" or running.round != doc.round:
        return False
    return running.slot < doc.slots and all(seat.slot != running.slot for seat in batch.state.seats)


def look_for_failure(batch: Batch, ask: Join, seat: Seat) -> None:
    """Report again for an agent whose report may have been lost with the document."""
    if ask.running_state in {"failed", "stopped"}:
        reason = f"the ranks of {ask.node} had {ask.running_state} when the document was lost"
        member_lost(batch, seat, Sign("rank_exited", reason, node=ask.node))


def settle(batch: Batch) -> None:
    """End a round with a slot that no agent claims, once all others have finished and waited."""
    state, doc = batch.state, batch.state.doc
    unclaimed = doc.slots - state.count(*AT_WORK)
    if doc.phase != "running" or not unclaimed or state.count("starting", "running"):
        return
    batch.timers.start("unclaimed", doc.round)
    left_s = batch.join_within_s - batch.timers.elapsed("unclaimed", doc.round)
    if left_s > 0:
        batch.wake_in(left_s)
        return
    reason = (
        f"no agent has claimed {unclaimed} of {doc.slots} slots within "
        f"{batch.join_within_s:g} s since the document was lost"
    )
    end_round(batch, Sign("node_lost", reason))


def _go_to_round(batch: Batch, number: int) -> None:
    batch.state.set(round=number)
    batch.timers.start("phase", number, batch.state.doc.phase)


def _go_on(batch: Batch, ask: Join) -> None:
    assert ask.running is not None
    running = ask.running
    batch.state.set(
        slots=running.slots,
        world_size=running.world_size,
        master_address=running.master_address,
        master_port=running.master_port,
        start_order=running.id,
        restarts=running.restarts,
        recent=tuple(range(1, running.restarts + 1)),
        replication=Replication(key=running.replica_key),
        has_stepped=True,
        has_ever_stepped=True,
    )
    batch.enter("running", "its agents report it: the document was lost")
