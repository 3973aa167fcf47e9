"""Decides whether another round follows the one that ended, and after how long a backoff.

`budgets.judge` makes the decision from numbers alone. This module asks for it once the nodes of the
round have answered, records it, and lets the next round wait until the backoff is over.
"""

from msgspec.structs import replace

from everstep.incident_causes import CONSEQUENCE
from everstep.messages import JobSpec, Option
from everstep.messages.documents.rounds import OpenIncident
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.budgets import (
    CANNOT_START,
    HOUR_S,
    RestartDecision,
    RestartHistory,
    RestartRules,
    RoundFailure,
    judge,
)
from everstep_services.rendezvous.domain.decisions import decide_to, only_say
from everstep_services.rendezvous.domain.ends import JobEnd, end_job, saves_first


def settle(batch: Batch) -> bool:
    """Decide what follows the last round, and return whether the next one may form now.

    It may once the nodes have answered, or their time is over, and the backoff is over.
    """
    doc = batch.state.doc
    if doc.phase == "joining":
        return True
    owing = batch.state.count("stopping")
    trigger = doc.incident.trigger if doc.incident else "operator"
    patience_s = (
        batch.state.doc.spec.stop_grace_s + batch.evidence_s(trigger) + batch.settings.last_call_s
    )
    if doc.incident is not None and doc.incident.is_of_code and not doc.has_ever_stepped:
        patience_s += batch.settings.alike_within_s
    _decide_in_time(batch, owing, patience_s)
    incident = batch.state.doc.incident
    if batch.state.doc.phase != "ending" or (incident is not None and not incident.is_decided):
        return False
    if owing:
        left_s = patience_s - batch.phase_s
        if left_s > 0:
            batch.wake_in(left_s)
            return False
    return _backoff_is_over(batch)


def _decide_in_time(batch: Batch, owing: int, patience_s: float) -> None:
    incident = batch.state.doc.incident
    if incident is None or incident.is_decided:
        return
    # Consequences have a cause: a node that owes an answer may be it, and is awaited anyway.
    is_open = incident.weight <= CONSEQUENCE or batch.is_compared
    left_s = (patience_s if is_open else batch.settings.cause_within_s) - batch.phase_s
    if owing and left_s > 0:
        batch.wake_in(left_s)
        return
    _decide(batch)


def _backoff_is_over(batch: Batch) -> bool:
    incident = batch.state.doc.incident
    if incident is None or not incident.delay_s:
        return True
    left_s = incident.delay_s - batch.phase_s
    if left_s > 0:
        batch.wake_in(left_s)
    return left_s <= 0


def _decide(batch: Batch) -> None:
    """Decide what follows the ended round; once, when all have reported."""
    incident = batch.state.doc.incident
    if incident is None or incident.is_decided:
        return
    if incident.weight <= CONSEQUENCE and batch.state.is_left:
        incident = replace(incident, trigger="preempted")
    failure = _failure(batch, incident)
    rules = RestartRules(
        batch.state.doc.spec,
        batch.settings,
        may_stop=_may_stop(batch, batch.state.doc.spec),
        may_stop_start=batch.control.enforces("stop", otherwise=True),
        is_braked=batch.control.is_braked,
        stop_ordered=(batch.state.ordered_stop or (0, ""))[1],
    )
    decision = judge(failure, _past(batch), rules)
    if decision.action == "stop" and not failure.asks and saves_first(batch):
        return
    _keep(batch, decision)
    _say_decided(batch, decision, incident.reason, incident.id, incident.trigger_fact)
    if decision.action == "stop":
        has_failed = decision.exit_code == 1 or decision.rule == CANNOT_START
        state: JobEnd = "failed" if has_failed else "stopped"
        batch.state.set(is_mendable=decision.rule == CANNOT_START)
        end_job(batch, state, decision.exit_code, f"{incident.reason}; {decision.reason}")
        return
    batch.state.set(incident=replace(incident, is_decided=True, delay_s=decision.delay_s))
    if decision.delay_s:
        after = f"{decision.backoff}; the last one: {incident.reason}"
        if decision.advice and "stop" not in batch.state.doc.spec.enforce:
            after += "; --stop-on-repeat ends the job instead"
        number = batch.state.doc.round + 1
        batch.say_waiting("backoff", f"waits {decision.delay_s:g} s before round {number}: {after}")


def _failure(batch: Batch, incident: OpenIncident) -> RoundFailure:
    doc = batch.state.doc
    lived = batch.timers.started_at("lived", doc.round)
    stepping = batch.timers.started_at("stepping", doc.round)
    ended = batch.timers.started_at("phase", doc.round, "ending") or batch.now.s
    return RoundFailure(
        cause=incident.trigger,
        lived_s=0.0 if lived is None else max(ended - lived, 0.0),
        steps_s=0.0 if stepping is None else max(ended - stepping, 0.0),
        step=doc.round_step,
        fingerprint=incident.fingerprint,
        exit_code=incident.exit_code,
        is_of_code=incident.is_of_code,
        is_on_all_ranks=batch.are_all_alike,
        asks=incident.asks,
        has_ever_stepped=doc.has_ever_stepped or doc.last_step is not None,
    )


def _past(batch: Batch) -> RestartHistory:
    doc = batch.state.doc
    return RestartHistory(
        restarts=doc.restarts,
        refilled=doc.refilled,
        recent=len(_recent(batch)),
        quick_failures=doc.quick_failures,
        idle_rounds=doc.idle_rounds,
        is_moved=doc.is_moved,
        best_step=doc.last_step,
        fingerprints=doc.fingerprints,
    )


def _recent(batch: Batch) -> tuple[int, ...]:
    """Return the restarts that may lie within the last hour; one of unknown age may."""
    return tuple(
        number
        for number in batch.state.doc.recent
        if batch.timers.elapsed("restart", batch.state.doc.job, number) < HOUR_S
    )


def _keep(batch: Batch, decision: RestartDecision) -> None:
    past = decision.past
    doc = batch.state.doc
    is_restart = decision.action == "restart" and past.restarts > doc.restarts
    latest = _recent(batch)
    if is_restart:
        latest = (*latest, past.restarts)
        batch.timers.start("restart", doc.job, past.restarts)
    batch.state.set(
        restarts=past.restarts if is_restart else doc.restarts,
        recent=latest,
        refilled=past.refilled,
        quick_failures=past.quick_failures,
        idle_rounds=past.idle_rounds,
        is_moved=past.is_moved,
        last_step=past.best_step,
        fingerprints=past.fingerprints,
        budgets=decision.budgets,
    )


def _say_decided(
    batch: Batch, decision: RestartDecision, reason: str, incident: str, trigger_fact: str | None
) -> None:
    doc = batch.state.doc
    gone = tuple(seat.node for seat in batch.state.in_stage("gone"))[:100]
    took_s = batch.timers.elapsed("phase", doc.round, "ending")
    if decision.advice:
        only_say(
            batch,
            "stop",
            decision.advice,
            rule=decision.advice_rule,
            incident=incident,
            evidence=(trigger_fact,) if trigger_fact else (),
            considered=(Option(action="restart", rejected="it is likely to fail again"),),
            budgets=decision.budgets,
            took_s=took_s,
        )
    decide_to(
        batch,
        decision.action,
        f"{reason}; {decision.reason}",
        rule=decision.rule,
        incident=incident,
        evidence=(trigger_fact,) if trigger_fact else (),
        missing=decision.missing,
        considered=decision.considered,
        budgets=decision.budgets,
        nodes_out=gone,
        delay_s=decision.delay_s,
        took_s=took_s,
    )


def _may_stop(batch: Batch, spec: JobSpec) -> bool:
    return batch.control.enforces("stop", otherwise="stop" in spec.enforce)
