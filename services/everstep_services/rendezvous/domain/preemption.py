"""Preemption: decides about a node that is about to be taken away, and about the others."""

from msgspec.structs import replace

from everstep.messages import PreemptionPlanned, Report, Seat
from everstep.messages.documents.rounds import PlannedEnd
from everstep_services.rendezvous.domain import agreed_save
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.formation import candidate_of, world_of
from everstep_services.rendezvous.domain.placement import largest_size

_EXIT = "save_and_exit"


def preempted(batch: Batch, seat: Seat, report: Report) -> None:
    """Note that a node will leave by itself; until then all ranks may save."""
    if seat.is_leaving or batch.state.doc.phase not in {"forming", "running"}:
        return
    reason = f"{seat.node}: {report.reason}"
    batch.state.send_away(seat, reason)
    agreed_save.ask(batch, reason, "preemption", within_s=report.grace_s, then_stop=True)


def settle(batch: Batch) -> None:
    """Plan the end of the round once the step is agreed on, and again when more nodes leave."""
    doc = batch.state.doc
    save = doc.saving
    if save is None or save.occasion != "preemption" or save.after_step is None or save.then_leave:
        return
    if batch.state.ordered_stop is not None:  # all ranks save and end, and no round follows
        return
    leaving = [seat.node for seat in batch.state.members if seat.is_leaving]
    plan, why = _plan(batch, len(leaving))
    if plan == save.plan:
        return
    batch.record(
        PreemptionPlanned(
            **batch.round_head(),
            plan=plan,
            reason=f"{save.reason}; {why}",
            stop_after_step=save.furthest,
            nodes=tuple(leaving[:100]),
            incident=doc.incident.id if doc.incident else None,
        )
    )
    if plan == _EXIT:
        batch.state.set(saving=replace(save, plan=plan, then_leave=True), planned=None)
    elif save.furthest is None:
        batch.state.set(
            saving=None
        )  # no step can be agreed on: the round ends when the node leaves
    else:
        batch.state.set(saving=replace(save, plan=plan))
        agreed_save.plan_end(batch, _end(save.reason, save.within_s, leaving[0]))


def _end(reason: str, within_s: float | None, node: str) -> PlannedEnd:
    return PlannedEnd(cause="preempted", reason=reason, within_s=within_s or 0.0, node=node)


def _plan(batch: Batch, leaving: int) -> tuple[str, str]:
    doc = batch.state.doc
    stay = [
        candidate_of(seat)
        for seat in batch.state.seats
        if seat.instance and seat.stage != "gone" and not seat.is_leaving
    ]
    size = largest_size(stay, world_of(batch))
    why = f"{leaving} of {doc.slots} nodes leave, and {len(stay)} remain"
    if size >= doc.slots:
        return "replace", f"{why}: enough for the next round"
    if size:
        return "shrink", f"{why}: enough for a round of {size}"
    return _EXIT, f"{why}: too few for another round"
