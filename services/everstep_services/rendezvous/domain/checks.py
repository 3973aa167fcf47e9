"""Decides whether a failed probe ends the round, or accuses no node since all nodes fail alike.

Rendezvous asks the other nodes of the round, and its spares, to run the same check. It acts only
against a node whose check fails while another node passes it: what fails everywhere is shared, as
a file system is, and a check that nobody else can run proves nothing. Without a place to go to,
training on that node is better than no training: only the policy `exclude` then ends the round.
"""

import dataclasses

from msgspec.structs import replace

from everstep.messages import Report, RunChecks
from everstep.messages.base import shared
from everstep.messages.documents.rounds import CheckAccusation, OpenCheck
from everstep.messages.facts.incidents import CHECK_CONFIRMED
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import came_of, decide_to, only_say
from everstep_services.rendezvous.domain.ends import end_round
from everstep_services.rendezvous.domain.formation import candidate_of, may_have_slot, world_of
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.liveness import fell_away
from everstep_services.rendezvous.domain.placement import largest_size
from everstep_services.rendezvous.domain.state import AT_WORK

_CHECKS_MOST = 16
_ACCUSED_MOST = 16
_SHARED_LEAST = 3
_SHARED_RATIO = 0.5
"""A check that fails on this share of the slots, and at least on three nodes, is shared."""
_SHARED_FOR_S = 240.0
"""A shared failure is not compared again for this long; agents report it again after 300 s."""
_SPARES_MOST = 32
"""The limit of spares that are waited for and counted; others run the check, too."""
ALONE = "checks.alone"
"""The rule by which the only node of a job leaves: nothing could be compared."""
NO_PLACE = "checks.no_place"
"""The rule by which a round goes on: only the accused nodes could have its slots."""


def failed(batch: Batch, report: Report) -> None:
    """Note a failed probe whose policy wants another round."""
    doc = batch.state.doc
    if doc.phase == "ending":
        if doc.incident is not None:
            incidents.add(batch, _sign(_accusation(report), report.check, report.step))
        return
    if not batch.control.enforces("restart", otherwise=True):
        _observe(batch, report, "restarts only observe")
        return
    check = _find(batch, report.check)
    if check is None:
        if len(doc.checks) >= _CHECKS_MOST:
            return  # its agent reports it again
        check = OpenCheck(id=batch.now.new_id(), check=report.check)
        batch.state.set(checks=(*doc.checks, check))
    nodes = {accusation.node for accusation in check.accused}
    if report.node not in nodes and len(nodes) < _ACCUSED_MOST:
        check = replace(check, accused=(*check.accused, _accusation(report)))
    _put(batch, _marked(check, report.slot, has_failed=True))


def compared(batch: Batch, report: Report) -> None:
    """Note the result of a check on another node. Only a clear result counts."""
    check = _find(batch, report.check)
    if check is not None and report.check_state in {"failed", "ok", "warning"}:
        _put(batch, _marked(check, report.slot, has_failed=report.check_state == "failed"))


def compared_spare(batch: Batch, report: Report) -> None:
    """Note the result of a check on a spare, which has no slot."""
    check = _find(batch, report.check)
    if check is None or report.node not in _spares(batch):
        return
    if report.check_state not in {"failed", "ok", "warning"}:
        return
    failed = tuple(node for node in check.spares_failed if node != report.node)
    passed = tuple(node for node in check.spares_passed if node != report.node)
    if report.check_state == "failed":
        failed = (*failed, report.node)
    else:
        passed = (*passed, report.node)
    _put(batch, replace(check, spares_failed=failed, spares_passed=passed))


def recovered(batch: Batch, report: Report) -> None:
    """Drop the accusation of a node whose probe passes again."""
    check = _find(batch, report.check)
    if check is None:
        return
    accused = tuple(item for item in check.accused if item.node != report.node)
    check = _marked(replace(check, accused=accused), report.slot, has_failed=False)
    if accused:
        _put(batch, check)
    else:
        _drop(batch, check)


def settle(batch: Batch) -> None:
    """Ask the other nodes; act once the answers or the time suffice."""
    for check in batch.state.doc.checks:
        if batch.state.doc.phase in {"forming", "running"}:
            _look(batch, check)


def _look(batch: Batch, check: OpenCheck) -> None:
    if check.is_shared:
        batch.timers.start("check_shared", check.id)
        if batch.timers.elapsed("check_shared", check.id) >= _SHARED_FOR_S:
            _drop(batch, check)
        return
    spares = _spares(batch)
    if batch.state.doc.slots == 1 and not spares:
        _act(batch, check, "no other node can be compared", ALONE)
        return
    within_s = batch.settings.check_compare_s
    if not batch.timers.is_running("check_asked", check.id):
        batch.timers.start("check_asked", check.id)
        _ask(batch, check, within_s)
    left_s = within_s - batch.timers.elapsed("check_asked", check.id)
    answers = (int(check.failed or "0", 16) | int(check.passed or "0", 16)).bit_count()
    heard = {*check.spares_failed, *check.spares_passed}
    if left_s > 0 and (answers < batch.state.doc.slots or not heard.issuperset(spares)):
        batch.wake_in(left_s)
        return
    _decide(batch, check)


def _spares(batch: Batch) -> tuple[str, ...]:
    """Return the spares that are compared: they could have a slot."""
    spares = (
        seat.node
        for seat in batch.state.in_stage("idle")
        if seat.slot is None and may_have_slot(batch, seat)
    )
    return tuple(sorted(spares)[:_SPARES_MOST])


def _ask(batch: Batch, check: OpenCheck, within_s: float) -> None:
    first = check.accused[0] if check.accused else None
    reason = f"{check.check} fails" + (f" on {first.node}: {first.reason}" if first else "")
    batch.send(
        RunChecks(
            id=check.id,
            job=batch.state.doc.job,
            round=batch.state.doc.round,
            reason=reason,
            checks=(check.check,),
            occasion="compare",
            within_s=within_s * 0.8,
        )
    )


def _decide(batch: Batch, check: OpenCheck) -> None:
    nodes = batch.state.doc.slots + len({*check.spares_failed, *check.spares_passed})
    failures = int(check.failed or "0", 16).bit_count() + len(check.spares_failed)
    passes = int(check.passed or "0", 16).bit_count() + len(check.spares_passed)
    share = f"{check.check} fails on {failures} of {nodes} nodes, and passes on {passes}"
    fails = int(check.failed or "0", 16)
    still = tuple(item for item in check.accused if fails >> item.slot & 1)
    if not still:  # it passes where it had failed
        _drop(batch, check)
        return
    check = replace(check, accused=still)
    is_shared = failures >= max(_SHARED_LEAST, _SHARED_RATIO * nodes)
    if passes and not is_shared:
        _act(batch, check, share, CHECK_CONFIRMED)
        return
    why = "they share its cause" if failures > 1 else "no other node could confirm it"
    _let_run(batch, check, f"{share}: it accuses no node, since {why}", "checks.shared")


def _act(batch: Batch, check: OpenCheck, share: str, rule: str) -> None:
    """End the round if its nodes have a place to go to, or must leave in any case."""
    if _has_place(batch, check):
        _end(batch, check, share, rule)
        return
    leaving = tuple(item for item in check.accused if _must_leave(batch, item))
    if leaving:
        _end(batch, replace(check, accused=leaving), share, rule)
        return
    nodes = ", ".join(item.node for item in check.accused)
    fail = f" ({', '.join(check.spares_failed)} fails it, too)" if check.spares_failed else ""
    reason = f"{share}: the round goes on with {nodes}, since no spare passes the check{fail}"
    _let_run(batch, check, reason, NO_PLACE)


def _has_place(batch: Batch, check: OpenCheck) -> bool:
    """Return whether a round can form from the nodes on which the check is not known to fail."""
    failing = {*check.spares_failed, *(item.node for item in check.accused)}
    others = [
        candidate_of(seat)
        for seat in batch.state.in_stage("idle", *AT_WORK)
        if seat.node not in failing and may_have_slot(batch, seat)
    ]
    return largest_size(others, world_of(batch)) > 0


def _let_run(batch: Batch, check: OpenCheck, reason: str, rule: str) -> None:
    """Record that the round goes on; the check is compared again after some minutes."""
    only_say(batch, "restart", reason, rule=rule, evidence=_facts(check))
    _put(batch, replace(check, is_shared=True))
    batch.timers.start("check_shared", check.id)


def _end(batch: Batch, check: OpenCheck, share: str, rule: str) -> None:
    """End the round for the accused nodes; those with the policy `exclude` leave the job."""
    _drop(batch, check)
    if not check.accused:
        return
    leaving = [item for item in check.accused if _leaves(batch, check, item)]
    first, *others = check.accused
    failing = [*(accusation.node for accusation in check.accused), *check.spares_failed]
    sign = _sign(first, check.check, None)
    sign = dataclasses.replace(
        sign,
        reason=f"{sign.reason} ({share})",
        accused=tuple(failing[:_ACCUSED_MOST]),
    )
    end_round(batch, sign)
    for node in check.spares_failed:
        _send_back(batch, node, sign)
    for other in others:
        incidents.add(batch, _sign(other, check.check, None))
    for accusation in leaving:
        _record_leaving(batch, check.check, accusation, share, rule)


def _send_back(batch: Batch, node: str, sign: Sign) -> None:
    """Have a spare that fails the check join again: it must not get the slot meanwhile."""
    seat = batch.state.seat(node)
    if seat is not None and seat.slot is None and seat.stage == "idle":
        fell_away(batch, seat, sign)


def _must_leave(batch: Batch, accusation: CheckAccusation) -> bool:
    return accusation.policy == "exclude" and batch.control.enforces("exclude", otherwise=True)


def _leaves(batch: Batch, check: OpenCheck, accusation: CheckAccusation) -> bool:
    """Have a node leave the job, if its policy wants that and exclusions are carried out."""
    seat = batch.state.seat(accusation.node)
    if accusation.policy != "exclude" or seat is None:
        return False
    if not _must_leave(batch, accusation):
        text = f"{accusation.node} fails {check.check}; exclusions only observe"
        only_say(batch, "exclude", text, rule="exclude.observe", evidence=_facts(check))
        return False
    why = f"{seat.node} fails {check.check}: {accusation.reason}"
    batch.state.send_away(seat, why)
    return True


def _record_leaving(
    batch: Batch, check: str, accusation: CheckAccusation, share: str, rule: str
) -> None:
    incident = batch.state.doc.incident
    decide_to(
        batch,
        "exclude",
        f"{accusation.node} leaves the job, as the policy of its probe {check} wants: "
        f"{accusation.reason} ({share})",
        rule=rule,
        check=check,
        incident=incident.id if incident else None,
        evidence=(accusation.fact,) if accusation.fact else (),
        nodes_out=(accusation.node,),
    )
    came_of(batch, "done", f"{accusation.node} leaves the job", "exclude")


def _observe(batch: Batch, report: Report, why: str) -> None:
    doc = batch.state.doc
    if batch.timers.is_running("observed", doc.round, report.node, report.check):
        return
    batch.timers.start("observed", doc.round, report.node, report.check)
    only_say(
        batch,
        "restart",
        f"{report.node} fails {report.check}: {report.reason}; {why}",
        rule="restart.observe",
        evidence=(report.fact,) if report.fact else (),
    )


def _accusation(report: Report) -> CheckAccusation:
    return CheckAccusation(**shared(CheckAccusation, report))


def _sign(accusation: CheckAccusation, check: str, step: int | None) -> Sign:
    return Sign(
        "check_failed",
        f"check {check} fails on {accusation.node}: {accusation.reason}",
        node=accusation.node,
        trigger_fact=accusation.fact,
        step=step,
        check=check,
    )


def _facts(check: OpenCheck) -> tuple[str, ...]:
    return tuple(item.fact for item in check.accused if item.fact)


def _marked(check: OpenCheck, slot: int, *, has_failed: bool) -> OpenCheck:
    bit = 1 << slot
    failures, passes = int(check.failed or "0", 16), int(check.passed or "0", 16)
    failures, passes = (
        (failures | bit, passes & ~bit) if has_failed else (failures & ~bit, passes | bit)
    )
    return replace(check, failed=f"{failures:x}", passed=f"{passes:x}")


def _find(batch: Batch, name: str) -> OpenCheck | None:
    return next((check for check in batch.state.doc.checks if check.check == name), None)


def _put(batch: Batch, check: OpenCheck) -> None:
    checks = batch.state.doc.checks
    batch.state.set(checks=tuple(check if item.id == check.id else item for item in checks))


def _drop(batch: Batch, check: OpenCheck) -> None:
    left = tuple(item for item in batch.state.doc.checks if item.id != check.id)
    batch.state.set(checks=left)
    batch.timers.clear("check_asked", check.id)
    batch.timers.clear("check_shared", check.id)
