"""Acts on what agents report about their part of the round."""

from everstep.incident_causes import known_cause
from everstep.lost_steps import FIRST_STEP, healed_in_words, steps_again, steps_again_in_words
from everstep.messages import (
    Report,
    Reported,
    RoundStarted,
    Seat,
)
from everstep_services.rendezvous.domain import agreed_save, checks, incidents, preemption, stalls
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.budgets import ASKS
from everstep_services.rendezvous.domain.decisions import came_of
from everstep_services.rendezvous.domain.ends import end_round, finish
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.state import with_stage


def hear(batch: Batch, report: Report) -> bool:
    """Act on a report; return False if its round or its agent is not the current one.

    Such a report changes nothing: the round is the fencing token.
    """
    state, doc = batch.state, batch.state.doc
    seat = state.seat(report.node)
    if report.round != doc.round or doc.phase not in {"forming", "running", "ending"}:
        return False
    if seat is None or not (_is_its_own(seat, report) or _is_compared_spare(seat, report)):
        return False
    _steps(batch, seat, report)
    match report.event:
        case "rank_exited" | "start_failed":
            _bad(batch, report)
        case "rank_stalled":
            stalls.stalled(batch, report)
        case "rank_recovered":
            stalls.recovered(batch, report)
        case "excused":
            stalls.excused(batch, report)
        case "check_failed" | "check_recovered" | "check_compared":
            _check(batch, seat, report)
        case _:
            _goes_on(batch, seat, report)
    return True


def _check(batch: Batch, seat: Seat, report: Report) -> None:
    match report.event:
        case "check_failed":
            checks.failed(batch, report)
        case "check_recovered":
            checks.recovered(batch, report)
        case _ if seat.slot is None:
            checks.compared_spare(batch, report)
        case _:
            checks.compared(batch, report)


def _goes_on(batch: Batch, seat: Seat, report: Report) -> None:
    match report.event:
        case "started":
            _started(batch, seat, report)
        case "first_step":
            _first_step(batch, report)
        case "first_collective":
            ago_s = max(report.last_progress_age_s or 0.0, 0.0)
            batch.timers.restart("moving", batch.state.doc.round, ago_s=ago_s)
        case "finished":
            _finished(batch, seat)
        case "preempted":
            preemption.preempted(batch, seat, report)
        case "reached":
            agreed_save.reached(batch, seat, report)
        case "stopped":
            agreed_save.stopped(batch, seat)
        case _:
            pass  # a kind of report of a newer agent


def _is_its_own(seat: Seat, report: Report) -> bool:
    is_holder = seat.instance == report.instance and seat.slot == report.slot
    return is_holder and seat.stage not in {"gone", "absent", "idle"}


def _is_compared_spare(seat: Seat, report: Report) -> bool:
    is_spare = seat.instance == report.instance and seat.slot is None and seat.stage == "idle"
    return is_spare and report.event == "check_compared"


def answer(batch: Batch, report: Report, *, is_current: bool) -> Reported:
    """Return the answer to a report, once the whole batch is decided."""
    doc = batch.state.doc
    is_stall = is_current and report.event == "rank_stalled"
    cause, weight = stalls.explanation(batch, report.rank) if is_stall else ("", 0)
    return Reported(
        round=doc.round,
        is_current=is_current,
        incident=doc.incident.id if doc.incident else None,
        phase=doc.phase,
        cause=cause,
        weight=weight,
    )


def settle(batch: Batch) -> None:
    """Start the round once every member has started; finish it once every slot has finished."""
    state, doc = batch.state, batch.state.doc
    if doc.phase not in {"forming", "running"}:
        return
    if doc.slots and state.count("finished") == doc.slots:
        if not agreed_save.all_ended(batch):
            finish(batch)
        return
    if doc.phase == "running" and doc.incident is not None and not doc.incident.stalled:
        _steady(batch)
    ready = state.count("running", "finished")
    if doc.phase == "forming" and doc.slots and ready == doc.slots:
        _runs(batch)


def _steps(batch: Batch, seat: Seat, report: Report) -> None:
    doc = batch.state.doc
    if seat.slot is None or report.step is None:
        return
    if report.step > (doc.round_step or -1):
        batch.state.set(round_step=report.step)


def _started(batch: Batch, seat: Seat, report: Report) -> None:
    if seat.stage != "starting":
        return
    doc = batch.state.doc
    batch.state.put(with_stage(seat, "running"))
    batch.state.set(warm_ranks=doc.warm_ranks + report.warm_ranks)
    batch.memory.slowest = seat.node


def _runs(batch: Batch) -> None:
    doc = batch.state.doc
    batch.record(
        RoundStarted(
            **batch.round_head(),
            start_s=batch.phase_s,
            master_address=doc.master_address,
            master_port=doc.master_port,
            warm_ranks=doc.warm_ranks,
            slowest_node=batch.memory.slowest,
        )
    )
    incidents.started(batch)
    came_of(batch, "done", f"all ranks of round {doc.round} run", "restart")
    batch.enter("running", f"round {doc.round} runs")
    if doc.has_stepped:
        _recovered(batch)


def _first_step(batch: Batch, report: Report) -> None:
    doc = batch.state.doc
    if doc.has_stepped or doc.phase == "ending":
        return
    batch.state.set(has_ever_stepped=True)
    batch.state.set(has_stepped=True, first_step=report.step, restore_s=report.restore_s)
    batch.state.set(heal_s=report.heal_s, healed=report.healed, survives=report.survives)
    batch.timers.start("stepping", doc.round)
    if doc.phase == "running":
        _recovered(batch, report.age_s)


def _recovered(batch: Batch, ago_s: float = 0.0) -> None:
    incident, doc = batch.state.doc.incident, batch.state.doc
    if incident is not None:
        reason = f"round {doc.round} {FIRST_STEP}"
        if doc.healed:
            again = steps_again(doc.first_step, doc.reached_step)
            reason = f"{healed_in_words(doc.healed, again)}; {reason}"
        elif told := steps_again_in_words(doc.round, doc.first_step, doc.reached_step):
            reason += f"; {told}"
        incidents.close(batch, "recovered", reason, "first_step_s", before_s=max(ago_s, 0.0))


def _steady(batch: Batch) -> None:
    """Count a round whose steps nobody sees as recovered when it has run for long."""
    incident, doc = batch.state.doc.incident, batch.state.doc
    left_s = batch.settings.steady_after_s - batch.phase_s
    if left_s > 0:
        batch.wake_in(left_s)
    elif incident is not None:
        lasted = f"round {doc.round} has run for {batch.settings.steady_after_s:g} s"
        reason = f"{lasted}, and no step was seen"
        incidents.close(batch, "recovered", reason, "other_s")


def _finished(batch: Batch, seat: Seat) -> None:
    if seat.stage in {"starting", "running"}:
        batch.state.put(with_stage(seat, "finished"))


def _bad(batch: Batch, report: Report) -> None:
    doc = batch.state.doc
    sign = _sign(report)
    if report.rank is not None and report.is_of_code:
        batch.memory.failed_alike(doc.round, report.fingerprint, report.rank)
    if doc.phase == "ending":
        if doc.incident is not None:
            incidents.add(batch, sign)
        return
    end_round(batch, sign)


def _sign(report: Report) -> Sign:
    still_s = max(report.age_s, report.last_progress_age_s or 0.0)
    is_end = report.event == "rank_exited"  # its moment is known: only what follows is detection
    detect_s = max(report.age_s, 0.0) if is_end else still_s
    return Sign(
        "numerics" if report.asks in ASKS else known_cause(report.event),
        report.reason,
        node=report.node,
        rank=report.rank,
        trigger_fact=report.fact,
        fingerprint=report.fingerprint,
        exit_code=report.exit_code,
        step=report.step,
        is_of_code=report.is_of_code,
        asks=report.asks if report.asks in ASKS else "",
        injected_by=report.injected_by,
        detect_s=detect_s,
        unfinished_s=still_s - detect_s,
    )
