"""All ranks save after the same step: agreed with their agents, ordered, and waited for.

A step that a rank may have finished before the order reaches it is no step to agree on: each agent
says how far its ranks are and how long a step takes, and the furthest decides. Orders are repeated
until the round ends, so that a lost one is late, never missed.
"""

from math import floor

from msgspec.structs import replace

from everstep.messages import Leave, Report, SaveCheckpoint, Seat
from everstep.messages.documents import AgreedSave, PlannedEnd
from everstep_services.rendezvous.domain.batch import Turn
from everstep_services.rendezvous.domain.ends import (
    PREEMPTED,
    end_job,
    end_preempted,
    end_round,
)
from everstep_services.rendezvous.domain.incidents import Sign

_REPEAT_S = 0.5
_SAVE_FOR_S = 5.0
"""How long an order to save and go on is repeated."""
_HASTE = 1.25
"""Steps may get so much shorter than they were."""


def ask(turn: Turn, reason: str, occasion: str, *, within_s: float | None, then_stop: bool) -> None:
    """Begin to agree on the step, unless it is agreed on already, and with the same end."""
    before = turn.state.doc.saving
    if before is not None and before.then_stop >= then_stop:
        if within_s is not None:
            within_s = min(within_s, before.within_s or within_s)
            turn.state.set(saving=replace(before, within_s=within_s))
        return
    saving = AgreedSave(
        id=turn.now.new_id(),
        reason=reason,
        occasion=occasion,
        within_s=within_s,
        then_stop=then_stop,
    )
    turn.state.set(saving=saving)
    turn.since("saving", saving.id)


def reached(turn: Turn, seat: Seat, report: Report) -> None:
    """An agent says how far its ranks are, or that nobody counts their steps."""
    saving = turn.state.doc.saving
    if saving is None or seat.slot is None:
        return
    if saving.after_step is not None:
        if saving.furthest is not None or report.step is None:
            return
        # Nobody counted steps when this was settled: all are asked again, for the same save.
        saving = replace(saving, after_step=None, answered="")
        turn.memory.forget("saving", saving.id)
    furthest = [step for step in (saving.furthest, _before_which(turn, report)) if step is not None]
    turn.state.set(
        saving=replace(
            saving,
            answered=f"{_answered(saving) | 1 << seat.slot:x}",
            furthest=max(furthest, default=None),
        )
    )


def stopped(turn: Turn, seat: Seat) -> None:
    """Every rank of a node has ended well, since it was told to stop."""
    if seat.stage not in {"starting", "running"}:
        return
    turn.state.put(replace(seat, stage="finished"))
    saving = turn.state.doc.saving
    if saving is not None:
        turn.state.set(saving=replace(saving, has_stopped=True))
    elif turn.state.doc.phase in {"forming", "running"}:
        reason = f"the ranks of {seat.node} have stopped to save, and nobody knows who asked"
        end_round(turn, "preempted", Sign("preempted", reason, node=seat.node))


def left(turn: Turn, seat: Seat, ask: Leave) -> None:
    """A node goes in the middle of a save: the others still have their time."""
    doc = turn.state.doc
    saving = doc.saving
    if saving is None or saving.after_step is None or ask.cause != "preempted":
        return
    has_saved = saving.furthest is not None and ask.exit_code == PREEMPTED
    if doc.phase in {"forming", "running"} and (saving.then_leave or has_saved):
        stopped(turn, seat)


def all_ended(turn: Turn) -> bool:
    """Whether every rank has ended because it was told to; then the round ends as was planned."""
    doc = turn.state.doc
    saving, planned = doc.saving, doc.planned
    if saving is None or not saving.has_stopped:
        return False
    if planned is not None:
        _end(turn, planned)
    elif saving.then_leave:
        end_preempted(turn, f"every node of round {doc.round} has left: {saving.reason}")
    else:
        end_round(turn, "preempted", Sign("preempted", saving.reason))
    return True


def plan_end(turn: Turn, planned: PlannedEnd) -> None:
    """End the round so, once its ranks have saved or had their time."""
    turn.memory.forget("planned", turn.state.doc.round)
    turn.state.set(planned=planned)


def agree(turn: Turn) -> None:
    """Settle on the step, once all have said how far they are, or had the time to."""
    doc = turn.state.doc
    saving = doc.saving
    if saving is None or saving.after_step is not None or doc.phase not in {"forming", "running"}:
        return
    count = _answered(saving).bit_count()
    left_s = turn.settings.save_agree_s - turn.since("saving", saving.id)
    if count < doc.slots and (left_s > 0 or not count):
        turn.wake_in(left_s if left_s > 0 else _REPEAT_S)
        return
    turn.state.set(saving=replace(saving, after_step=saving.furthest or 0))
    if saving.furthest is None and saving.occasion != "preemption":
        _nobody_counts(turn)


def settle(turn: Turn) -> None:
    """Order the save; end the round when those who were to save have had their time."""
    doc = turn.state.doc
    if doc.phase not in {"forming", "running"}:
        return
    if doc.planned is not None:
        left_s = doc.planned.within_s - turn.since("planned", doc.round)
        if left_s <= 0:
            _end(turn, doc.planned)
            return
        turn.wake_in(left_s)
    if doc.saving is not None:
        _order(turn, doc.saving)


def _order(turn: Turn, saving: AgreedSave) -> None:
    doc = turn.state.doc
    goes_on = saving.after_step is not None and not saving.then_stop
    if goes_on and turn.since("saved", saving.id) >= _SAVE_FOR_S:
        turn.state.set(saving=None)
        return
    said = ("save said", saving.id, saving.after_step, saving.then_leave)
    if turn.memory.known(*said) is None or turn.since(*said) >= _REPEAT_S:
        turn.memory.forget(*said)
        turn.send(
            SaveCheckpoint(
                id=saving.id,
                job=doc.job,
                round=doc.round,
                reason=saving.reason,
                occasion=saving.occasion,
                after_step=saving.after_step,
                then_stop=saving.then_stop,
                then_leave=saving.then_leave,
                within_s=saving.within_s,
            )
        )
    turn.wake_in(_REPEAT_S - turn.since(*said))


def _end(turn: Turn, planned: PlannedEnd) -> None:
    turn.memory.forget("planned", turn.state.doc.round)
    end_round(turn, planned.cause, Sign(planned.cause, planned.reason, node=planned.node))
    if planned.exit_code is not None:
        end_job(turn, "stopped", planned.exit_code, planned.reason)


def _nobody_counts(turn: Turn) -> None:
    """No rank can be told after which step to save: there is nothing to wait for."""
    turn.state.set(saving=None)
    planned = turn.state.doc.planned
    if planned is not None:
        turn.state.set(planned=replace(planned, within_s=0.0))


def _before_which(turn: Turn, report: Report) -> int | None:
    """The first step that none of the node's ranks can have finished when the order is there."""
    if report.step is None or not report.step_s:
        return None
    ahead_s = turn.settings.save_agree_s + turn.settings.save_lead_s
    moves_s = (report.last_progress_age_s or 0.0) + ahead_s
    return report.step + 1 + floor(_HASTE * moves_s / report.step_s)


def _answered(saving: AgreedSave) -> int:
    return int(saving.answered or "0", 16)
