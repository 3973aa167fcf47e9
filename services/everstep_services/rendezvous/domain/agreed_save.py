"""Makes all ranks save after the same step: agrees on it with their agents, orders it, and waits.

No rank may have finished that step before the order reaches it. So each agent reports the last
step of its ranks and how long a step takes, and the furthest rank decides. Orders are repeated
until the round ends, so that a lost order is late, never missed.
"""

from math import floor, inf

from msgspec.structs import replace

from everstep.incident_causes import known_cause
from everstep.messages import Leave, Report, SaveCheckpoint, Seat
from everstep.messages.base import shared
from everstep.messages.documents.rounds import AgreedSave, PlannedEnd
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.ends import (
    PREEMPTED,
    end_job,
    end_preempted,
    end_round,
)
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.state import with_stage

_REPEAT_S = 0.5
_SAVE_FOR_S = 5.0
"""How long an order to save and continue is repeated."""
_HASTE = 1.25
"""The factor by which steps may become faster than reported."""


def ask(
    batch: Batch, reason: str, occasion: str, *, within_s: float | None, then_stop: bool
) -> None:
    """Begin to agree on the step, unless the same save is agreed on already."""
    before = batch.state.doc.saving
    if before is not None and before.then_stop >= then_stop:
        if within_s is not None:
            within_s = min(within_s, before.within_s or within_s)
            occasion = occasion if occasion == "preemption" else before.occasion
            batch.state.set(saving=replace(before, within_s=within_s, occasion=occasion))
        return
    saving = AgreedSave(
        id=batch.now.new_id(),
        reason=reason,
        occasion=occasion,
        within_s=within_s,
        then_stop=then_stop,
    )
    batch.state.set(saving=saving)
    batch.timers.start("saving", saving.id)


def reached(batch: Batch, seat: Seat, report: Report) -> None:
    """Note the last step that an agent's ranks have made, or that nobody counts their steps."""
    saving = batch.state.doc.saving
    if saving is None or seat.slot is None:
        return
    if saving.after_step is not None:
        if saving.furthest is not None or report.step is None:
            return
        # Nobody counted steps when this was settled: ask all again, for the same save.
        saving = replace(saving, after_step=None, answered="")
        batch.timers.clear("saving", saving.id)
    furthest = [
        step for step in (saving.furthest, _before_which(batch, report)) if step is not None
    ]
    batch.state.set(
        saving=replace(
            saving,
            answered=f"{_answered(saving) | 1 << seat.slot:x}",
            furthest=max(furthest, default=None),
        )
    )


def stopped(batch: Batch, seat: Seat) -> None:
    """Note that every rank of a node has exited with 0 after the order to stop."""
    if seat.stage not in {"starting", "running"}:
        return
    batch.state.put(with_stage(seat, "finished"))
    saving = batch.state.doc.saving
    if saving is not None:
        batch.state.set(saving=replace(saving, has_stopped=True))
    elif batch.state.doc.phase in {"forming", "running"}:
        reason = (
            f"the ranks of {seat.node} have stopped to save, but rendezvous has no order for that"
        )
        end_round(batch, Sign("preempted", reason, node=seat.node))


def left(batch: Batch, seat: Seat, ask: Leave) -> None:
    """Note that a node leaves during a save; the others keep their time."""
    doc = batch.state.doc
    saving = doc.saving
    if saving is None or saving.after_step is None or ask.cause != "preempted":
        return
    has_saved = saving.furthest is not None and ask.exit_code == PREEMPTED
    if doc.phase in {"forming", "running"} and (saving.then_leave or has_saved):
        stopped(batch, seat)


def all_ended(batch: Batch) -> bool:
    """Whether every rank has ended as ordered; then the round ends as planned."""
    doc = batch.state.doc
    saving, planned = doc.saving, doc.planned
    if saving is None or not saving.has_stopped:
        return False
    if planned is not None:
        _end(batch, planned)
    elif saving.then_leave:
        end_preempted(batch, f"every node of round {doc.round} has left: {saving.reason}")
    else:
        end_round(batch, Sign("preempted", saving.reason))
    return True


def plan_end(batch: Batch, planned: PlannedEnd) -> None:
    """Plan the end of the round once its ranks have saved, or their time is over.

    Of two plans a stop of the job holds, then an earlier plan before a preemption, then the newer
    plan; the shorter time holds in each case.
    """
    before, within_s = batch.state.doc.planned, time_left(batch, planned.within_s)
    if before is not None and planned.exit_code is None:
        is_stronger = before.exit_code is not None or planned.cause == "preempted"
        planned = before if is_stronger else planned
    batch.timers.clear("planned", batch.state.doc.round)
    batch.state.set(planned=replace(planned, within_s=within_s))


def time_left(batch: Batch, within_s: float) -> float:
    """Return how long the ranks have to save: `within_s`, or less if that was planned before."""
    doc = batch.state.doc
    if doc.planned is None:
        return within_s
    batch.timers.start("planned", doc.round)
    left_s = doc.planned.within_s - batch.timers.elapsed("planned", doc.round)
    return max(min(left_s, within_s), 0.0)


def overruled(batch: Batch) -> str:
    """Return why no round can follow this one, whatever else is ordered; empty if one can."""
    saving, stop = batch.state.doc.saving, batch.state.ordered_stop
    if stop is not None:
        return f"{stop[1]}, and its agents exit with {stop[0]}"
    if saving is not None and saving.then_leave:
        return f"all nodes leave: {saving.reason}; the job continues when its agents start again"
    return ""


def end_after_save(batch: Batch, planned: PlannedEnd) -> None:
    """End the round as planned; at once without time to save."""
    if planned.within_s:
        ask(batch, planned.reason, "requested", within_s=planned.within_s, then_stop=True)
    plan_end(batch, planned)
    settle(batch)


def agree(batch: Batch) -> None:
    """Choose the step once all agents have reported theirs, or their time is over."""
    doc = batch.state.doc
    saving = doc.saving
    if saving is None or saving.after_step is not None or doc.phase not in {"forming", "running"}:
        return
    count = _answered(saving).bit_count()
    batch.timers.start("saving", saving.id)
    left_s = batch.settings.save_agree_s - batch.timers.elapsed("saving", saving.id)
    if count < doc.slots and (left_s > 0 or not count):
        batch.wake_in(left_s if left_s > 0 else _REPEAT_S)
        return
    batch.state.set(saving=replace(saving, after_step=saving.furthest or 0))
    if saving.furthest is None and saving.occasion != "preemption":
        _nobody_counts(batch)


def settle(batch: Batch) -> None:
    """Order the save; end the round when the ranks have saved, or their time is over."""
    doc = batch.state.doc
    if doc.phase not in {"forming", "running"}:
        return
    if doc.planned is not None:
        left_s = time_left(batch, inf)
        if left_s <= 0:
            _end(batch, doc.planned)
            return
        batch.wake_in(left_s)
    if doc.saving is not None:
        _order(batch, doc.saving)


def _order(batch: Batch, saving: AgreedSave) -> None:
    doc = batch.state.doc
    if saving.after_step is not None and not saving.then_stop:
        batch.timers.start("saved", saving.id)
        if batch.timers.elapsed("saved", saving.id) >= _SAVE_FOR_S:
            batch.state.set(saving=None)
            return
    order = (saving.id, saving.after_step, saving.then_leave)
    is_ordered = batch.timers.is_running("save_ordered", *order)
    if not is_ordered or batch.timers.elapsed("save_ordered", *order) >= _REPEAT_S:
        batch.timers.restart("save_ordered", *order)
        batch.send(SaveCheckpoint(**shared(SaveCheckpoint, saving), job=doc.job, round=doc.round))
    batch.wake_in(_REPEAT_S - batch.timers.elapsed("save_ordered", *order))


def _end(batch: Batch, planned: PlannedEnd) -> None:
    saving = batch.state.doc.saving
    batch.timers.clear("planned", batch.state.doc.round)
    if planned.exit_code is None and saving is not None and saving.then_leave:
        end_preempted(batch, f"{planned.reason}; all nodes leave: {saving.reason}")
        return
    end_round(batch, Sign(known_cause(planned.cause), planned.reason, node=planned.node))
    if planned.exit_code is not None:
        end_job(batch, "stopped", planned.exit_code, planned.reason)


def _nobody_counts(batch: Batch) -> None:
    """Go on at once: ranks whose steps nobody counts cannot agree on a step."""
    batch.state.set(saving=None)
    planned = batch.state.doc.planned
    if planned is not None:
        batch.state.set(planned=replace(planned, within_s=0.0))


def _before_which(batch: Batch, report: Report) -> int | None:
    """Return the first step that no rank of the node can have finished when the order arrives."""
    if report.step is None or not report.step_s:
        return None
    ahead_s = batch.settings.save_agree_s + batch.settings.save_lead_s
    moves_s = (report.last_progress_age_s or 0.0) + ahead_s
    return report.step + 1 + floor(_HASTE * moves_s / report.step_s)


def _answered(saving: AgreedSave) -> int:
    return int(saving.answered or "0", 16)
