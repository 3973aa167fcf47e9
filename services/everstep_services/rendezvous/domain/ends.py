"""The end of a round, of an allocation, of a job; and what is decided in between."""

from msgspec.structs import replace

from everstep.messages import (
    AllocationEnded,
    JobEnded,
    JobSpec,
    Option,
    RoundEnded,
)
from everstep.messages.documents import OpenIncident
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Turn
from everstep_services.rendezvous.domain.budgets import (
    CANNOT_START,
    HOUR_S,
    Failure,
    Judgement,
    Past,
    Rules,
    judge,
)
from everstep_services.rendezvous.domain.decisions import came_of, decide_to, only_say
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.state import AT_WORK, CONSEQUENCE, OVER

WITHOUT_INCIDENT = frozenset({"operator", "grow", "done"})
NOT_ENOUGH_NODES = 92
RETRYABLE = 90
PREEMPTED = 91
_ENDS_WITH = {"preempted": "preempted", "operator": "stopped", "done": "done", "failed": "failed"}


def end_round(turn: Turn, cause: str, sign: Sign) -> None:
    """The round is over for everybody: its ranks are to be stopped, and another may follow."""
    state, doc = turn.state, turn.state.doc
    if doc.phase == "forming":
        told = f"round {doc.round} was over before all of its ranks ran: {sign.reason}"
        came_of(turn, "failed", told, "restart")
    opened = None
    if cause not in WITHOUT_INCIDENT or doc.incident is not None:
        if doc.incident is None:
            opened = incidents.add(turn, sign)
        else:
            incidents.broke_again(turn, sign)
            opened = state.doc.incident
    _say_ended(turn, cause, sign, opened.id if opened else None)
    state.set(stop_order=turn.now.new_id(), planned=None, saving=None, stalls=())
    for seat in state.in_stage(*AT_WORK):
        state.put(replace(seat, stage="stopping" if seat.instance else "gone"))
    state.enter("ending", sign.reason, turn.now.wall)
    turn.since("phase", doc.round, "ending")
    turn.since("form", doc.round, doc.allocation)
    turn.send(turn.stop_order())


def decide(turn: Turn) -> None:
    """What comes after the round that has ended; once, when its reports are in."""
    incident = turn.state.doc.incident
    if incident is None or incident.is_decided:
        return
    if incident.weight <= CONSEQUENCE and turn.state.is_left:
        incident = replace(incident, trigger="preempted")
    failure = _failure(turn, incident)
    rules = Rules(
        turn.state.doc.spec,
        turn.settings,
        may_stop=_may_stop(turn, turn.state.doc.spec),
        may_stop_start=turn.control.enforces("stop", otherwise=True),
        is_braked=turn.control.is_braked,
    )
    found = judge(failure, _past(turn), rules)
    _keep(turn, found, is_counted=failure.is_counted)
    _say_decided(turn, found, incident.reason, incident.id, incident.trigger_fact)
    if found.action == "stop":
        state = "failed" if found.exit_code == 1 else "stopped"
        turn.state.set(is_mendable=found.rule == CANNOT_START)
        end_job(turn, state, found.exit_code, f"{incident.reason}; {found.reason}")
        return
    turn.state.set(incident=replace(incident, is_decided=True, delay_s=found.delay_s))
    if found.delay_s:
        after = f"{found.backoff}; the last one: {incident.reason}"
        if found.advice and "stop" not in turn.state.doc.spec.enforce:
            after += "; --stop-on-repeat ends the job instead"
        number = turn.state.doc.round + 1
        turn.say_waiting("backoff", f"waits {found.delay_s:g} s before round {number}: {after}")


def end_job(turn: Turn, state: str, exit_code: int, reason: str) -> None:
    """Over for good: whoever is here is sent away."""
    doc = turn.state.doc
    incident = doc.incident
    came_of(turn, "done", f"every agent is told to leave with code {exit_code}", "stop")
    if state != "done":
        incidents.close(turn, "failed" if state == "failed" else "stopped", reason, "decide_s")
    reached = [step for step in (doc.last_step, doc.round_step) if step is not None]
    turn.fact(
        JobEnded,
        state=state,
        exit_code=exit_code,
        reason=reason,
        last_step=max(reached, default=None),
        rounds=doc.round,
        incident=incident.id if incident else None,
    )
    _send_away(turn, "done" if state == "done" else "stopped", exit_code, reason)


def end_allocation(turn: Turn, exit_code: int, reason: str) -> None:
    """Over for now: the job may go on in another allocation."""
    came_of(turn, "failed", reason)
    incidents.close(turn, "failed", reason, "rendezvous_s")
    _send_away(turn, "stopped", exit_code, reason)


def end_preempted(turn: Turn, reason: str) -> None:
    """All of its nodes are taken away: the job goes on in another allocation."""
    incident = turn.state.doc.incident
    _say_ended(turn, "preempted", Sign("preempted", reason), incident.id if incident else None)
    incidents.close(turn, "preempted", reason, "other_s")
    _send_away(turn, "stopped", PREEMPTED, reason)


def finish(turn: Turn) -> None:
    """Every rank of the round has exited with 0."""
    doc = turn.state.doc
    came_of(turn, "done", "the round came to its good end")
    incidents.close(turn, "recovered", "the round came to its good end", "first_step_s")
    reason = f"every rank of round {doc.round} exited with 0"
    _say_ended(turn, "done", Sign("done", reason), None)
    end_job(turn, "done", 0, reason)


def close_allocations(turn: Turn, cause: str, reason: str, exit_code: int | None) -> None:
    """Record each allocation of which no agent is left."""
    doc = turn.state.doc
    here = {seat.allocation for seat in turn.state.seats if seat.stage != "gone"}
    for allocation in doc.allocations:
        if allocation in here:
            continue
        over = doc.phase in OVER
        turn.fact(
            AllocationEnded,
            allocation=allocation,
            state=_allocation_state(turn, cause),
            reason=doc.reason if over else reason,
            exit_code=doc.exit_code if over else exit_code,
        )
    left = tuple(name for name in doc.allocations if name in here)
    if left != doc.allocations:
        turn.state.set(allocations=left)
    if not here and doc.phase not in OVER:
        _abandoned(turn, cause, reason)


def _allocation_state(turn: Turn, cause: str) -> str:
    doc = turn.state.doc
    if doc.phase == "done":
        return "done"
    known = {1: "failed", NOT_ENOUGH_NODES: "failed", PREEMPTED: "preempted", 93: "stopped"}
    if doc.phase == "stopped" and doc.exit_code in known:
        return known[doc.exit_code]
    return _ENDS_WITH.get(cause, "lost")


def _abandoned(turn: Turn, cause: str, reason: str) -> None:
    """Nobody is left, and the job is not over."""
    doc = turn.state.doc
    exit_code = PREEMPTED if cause == "preempted" else RETRYABLE
    outcome = "preempted" if cause == "preempted" else "stopped"
    if doc.phase in {"forming", "running"}:
        _say_ended(turn, cause, Sign(cause, reason), doc.incident.id if doc.incident else None)
    incidents.close(turn, outcome, f"no agent is left: {reason}", "other_s")
    _send_away(turn, "stopped", exit_code, f"no agent is left: {reason}")


def _send_away(turn: Turn, phase: str, exit_code: int, reason: str) -> None:
    state = turn.state
    came_of(turn, "overtaken", reason)
    state.set(exit_code=exit_code, stop_order=turn.now.new_id())
    state.set(planned=None, saving=None, stalls=())
    for seat in [seat for seat in state.seats if seat.stage == "gone" or not seat.instance]:
        state.drop(seat.node)
    for seat in state.in_stage(*AT_WORK):
        state.put(replace(seat, stage="stopping"))
    state.enter(phase, reason, turn.now.wall)
    turn.send(turn.leave_order())


def _failure(turn: Turn, incident: OpenIncident) -> Failure:
    doc = turn.state.doc
    lived = turn.memory.known("lived", doc.round)
    stepping = turn.memory.known("stepping", doc.round)
    ended = turn.memory.known("phase", doc.round, "ending") or turn.now.s
    return Failure(
        cause=incident.trigger,
        lived_s=0.0 if lived is None else max(ended - lived, 0.0),
        steps_s=0.0 if stepping is None else max(ended - stepping, 0.0),
        step=doc.round_step,
        fingerprint=incident.fingerprint,
        exit_code=incident.exit_code,
        is_of_code=incident.is_of_code,
        is_on_all_ranks=turn.are_all_alike,
        has_ever_stepped=doc.has_ever_stepped or doc.last_step is not None,
    )


def _past(turn: Turn) -> Past:
    doc = turn.state.doc
    return Past(
        restarts=doc.restarts,
        refilled=doc.refilled,
        recent=len(recent(turn)),
        quick_failures=doc.quick_failures,
        idle_rounds=doc.idle_rounds,
        best_step=doc.last_step,
        fingerprints=doc.fingerprints,
    )


def recent(turn: Turn) -> tuple[int, ...]:
    """The restarts that may lie within the last hour: one whose age we do not know may."""
    return tuple(
        number
        for number in turn.state.doc.recent
        if turn.since("restart", turn.state.doc.job, number) < HOUR_S
    )


def _keep(turn: Turn, found: Judgement, *, is_counted: bool) -> None:
    past = found.past
    is_restart = found.action == "restart" and is_counted
    doc = turn.state.doc
    latest = recent(turn)
    if is_restart:
        latest = (*latest, past.restarts)
        turn.since("restart", doc.job, past.restarts)
    turn.state.set(
        restarts=past.restarts if is_restart else doc.restarts,
        recent=latest,
        refilled=past.refilled,
        quick_failures=past.quick_failures,
        idle_rounds=past.idle_rounds,
        last_step=past.best_step,
        fingerprints=past.fingerprints,
        budgets=found.budgets,
    )


def _say_ended(turn: Turn, cause: str, sign: Sign, incident: str | None) -> None:
    doc = turn.state.doc
    lived = turn.memory.known("lived", doc.round)
    turn.fact(
        RoundEnded,
        cause=cause,
        reason=sign.reason,
        lasted_s=None if lived is None else turn.now.s - lived,
        first_step=doc.first_step,
        last_step=doc.round_step,
        node=sign.node,
        rank=sign.rank,
        incident=incident,
        trigger=sign.fact,
    )


def _say_decided(
    turn: Turn, found: Judgement, reason: str, incident: str, trigger_fact: str | None
) -> None:
    doc = turn.state.doc
    gone = tuple(seat.node for seat in turn.state.in_stage("gone"))[:100]
    took_s = turn.since("phase", doc.round, "ending")
    if found.advice:
        only_say(
            turn,
            "stop",
            found.advice,
            rule=found.advice_rule,
            incident=incident,
            evidence=(trigger_fact,) if trigger_fact else (),
            considered=(Option(action="restart", rejected="it is likely to fail again"),),
            budgets=found.budgets,
            took_s=took_s,
        )
    decide_to(
        turn,
        found.action,
        f"{reason}; {found.reason}",
        rule=found.rule,
        incident=incident,
        evidence=(trigger_fact,) if trigger_fact else (),
        missing=found.missing,
        considered=found.considered,
        budgets=found.budgets,
        nodes_out=gone,
        delay_s=found.delay_s,
        took_s=took_s,
    )


def _may_stop(turn: Turn, spec: JobSpec) -> bool:
    return turn.control.enforces("stop", otherwise="stop" in spec.enforce)
