"""Decides whether another rank excuses a stalled one, or its round must end.

Where stalls may end no round, they are examined in the same way, and open an incident that is over
when the ranks move again.

A rank that waits for another rank, which saves or computes, has not stalled itself. Only the agents
of other nodes can know that, so they are asked first; a stall without an answer in time has no
excuse.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from everstep.incident_causes import CONSEQUENCE, PLAIN
from everstep.messages import CollectEvidence, NameExcuse, Report, StallLocated
from everstep.messages.base import shared
from everstep.messages.documents.rounds import OpenStall
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import only_say
from everstep_services.rendezvous.domain.ends import end_round
from everstep_services.rendezvous.domain.incidents import Sign

_MOST = 16
"""The most stalls that are examined at once; agents repeat their reports of further ones. An
incident whose round goes on names no more ranks than that."""
_ASK_AGAIN_S = 5.0
"""How long an excuse holds before the agents are asked again."""
_AWAKE_S = 5.0
"""How long a replica that just started, or was cut off, waits for agents before it asks them."""


def stalled(batch: Batch, report: Report) -> None:
    """Note a stalled rank that no other rank of its node excuses."""
    doc = batch.state.doc
    if doc.phase == "ending":
        if doc.incident is not None:
            incidents.add(batch, _sign(batch, _opened(batch, report)))
        return
    if _all_save(batch):
        return  # the round ends anyway, within the time given to its ranks
    standing = () if doc.incident is None else doc.incident.stalled
    is_known = report.rank in standing or len(standing) >= _MOST
    if is_known and not _may_end(batch, report):
        return
    if doc.slots == 1 or report.rank is None or report.is_stopped:
        _decide(batch, _opened(batch, report))
    elif reported := _found(batch, report.rank):
        _know_more(batch, reported, report)
    elif len(doc.stalls) < _MOST:
        batch.state.set(stalls=(*doc.stalls, _opened(batch, report)))


def _know_more(batch: Batch, stalls: Sequence[OpenStall], report: Report) -> None:
    """Add the rank's last step, and ask agents again that excused it without knowing it."""
    for stall in stalls:
        is_known = stall.entered is not None or stall.entered_in
        if not is_known and (report.entered is not None or report.entered_in):
            told = replace(
                stall,
                span=batch.now.new_id(),
                entered=report.entered,
                entered_in=report.entered_in,
                excused_s=0.0,
                excuse="",
            )
            _put(batch, told)


def excused(batch: Batch, report: Report) -> None:
    """Note a rank of another agent that the stalled rank may be waiting for."""
    left_s = min((report.excuse_s or 0.0) - report.age_s, _ASK_AGAIN_S)
    for stall in _found(batch, report.rank):
        if left_s > 0:
            _excuse(batch, stall, left_s, report.reason)


def recovered(batch: Batch, report: Report) -> None:
    """Drop the stall of a rank that makes progress again."""
    for stall in _found(batch, report.rank):
        if stall.node == report.node:
            _drop(batch, stall)
    incident = batch.state.doc.incident
    if incident is None or report.rank not in incident.stalled:
        return
    left = tuple(rank for rank in incident.stalled if rank != report.rank)
    batch.state.set(incident=replace(incident, stalled=left))
    if not left and incident.round == batch.state.doc.round:
        incidents.close(batch, "recovered", report.reason, "other_s", before_s=report.age_s)


def located(batch: Batch, finding: StallLocated) -> None:
    """Note where health has seen a stall begin: the cause where only waiting ranks are reported."""
    batch.memory.located = finding
    doc = batch.state.doc
    if doc.incident is not None and doc.incident.round == doc.round:
        _join_located(batch)


def explanation(batch: Batch, rank: int | None) -> tuple[str, int]:
    """What holds up a rank that has stalled, and how well that explains its stall."""
    doc = batch.state.doc
    causes = [(stall.excuse, CONSEQUENCE) for stall in _found(batch, rank) if stall.excuse]
    if finding := _located_elsewhere(batch, rank):
        causes.append((finding.reason, PLAIN if finding.is_certain else CONSEQUENCE))
    incident = doc.incident
    if incident is not None and incident.round == doc.round and incident.rank != rank:
        causes += [(incident.reason, incident.weight)] if incident.weight > CONSEQUENCE else []
    return max(reversed(causes), key=lambda cause: cause[1], default=("", 0))


def _located_elsewhere(batch: Batch, rank: int | None) -> StallLocated | None:
    """Where the stall of the round began, if the rank is among those that wait."""
    finding = batch.memory.located
    if finding is None or finding.round != batch.state.doc.round or not finding.first_ranks:
        return None
    is_elsewhere = finding.waiting_ranks > 0 and rank not in finding.first_ranks
    return finding if is_elsewhere else None


def _join_located(batch: Batch) -> None:
    incident = batch.state.doc.incident
    if incident is None or incident.trigger != "rank_stalled" or incident.weight > CONSEQUENCE:
        return
    finding = _located_elsewhere(batch, incident.rank)
    if finding is not None and finding.is_certain:
        node = finding.nodes[0] if len(finding.nodes) == 1 else None
        rank = finding.first_ranks[0]
        incidents.add(
            batch,
            Sign("rank_stalled", finding.reason, node=node, rank=rank, trigger_fact=finding.id),
        )


def settle(batch: Batch) -> None:
    """Ask for excuses; end the round for a stall without one."""
    stalls = sorted(batch.state.doc.stalls, key=lambda stall: _waited_s(batch, stall), reverse=True)
    for stall in stalls:
        if batch.state.doc.phase in {"forming", "running"} and not _all_save(batch):
            _look(batch, stall)


def _excuse(batch: Batch, stall: OpenStall, left_s: float, why: str) -> None:
    """Extend an excuse; each replica counts from its own reading, so none ends it too early."""
    longer_s = _excused_s(batch, stall)
    if longer_s > left_s:
        left_s, why = longer_s, stall.excuse
    _put(batch, replace(stall, span=batch.now.new_id(), excused_s=left_s, excuse=why))


def _excused_s(batch: Batch, stall: OpenStall) -> float:
    """Return the seconds for which the excuse still holds."""
    if not stall.excused_s:
        return 0.0
    batch.timers.start("stall_excused", stall.span)
    return stall.excused_s - batch.timers.elapsed("stall_excused", stall.span)


def _look(batch: Batch, stall: OpenStall) -> None:
    if stall.excused_s:
        left_s = _excused_s(batch, stall)
        if left_s > 0:
            batch.wake_in(left_s)
            return
        stall = replace(stall, span=batch.now.new_id(), excused_s=0.0, excuse="")
        _put(batch, stall)
    asleep_s = _AWAKE_S - batch.timers.elapsed("awake")
    if asleep_s > 0:
        batch.wake_in(asleep_s)
        return
    within_s = batch.settings.stall_excuse_s
    batch.timers.start("stall_asked", stall.span)
    left_s = within_s - batch.timers.elapsed("stall_asked", stall.span)
    if left_s <= 0:
        _decide(batch, stall)
        return
    half = "first" if left_s > within_s / 2 else "second"
    if not batch.timers.is_running("stall_ordered", stall.span, half):
        batch.timers.start("stall_ordered", stall.span, half)
        _ask(batch, stall, left_s)
    batch.wake_in(left_s - within_s / 2 if half == "first" else left_s)


def _ask(batch: Batch, stall: OpenStall, within_s: float) -> None:
    assert stall.rank is not None
    excuse = {**shared(NameExcuse, stall), "waited_s": _waited_s(batch, stall)}
    batch.send(NameExcuse(**{**excuse, **batch.order_head(stall.id)}, within_s=within_s))


def _decide(batch: Batch, stall: OpenStall) -> None:
    _drop(batch, stall)
    late = [
        other
        for other in batch.state.doc.stalls
        if _excused_s(batch, other) <= 0 and other.is_fatal == stall.is_fatal
    ]
    signs = [_sign(batch, it) for it in (stall, *late)]  # the cause has no excuse,
    signs.sort(key=lambda sign: -sign.weight)  # and does not wait for others
    if not _may_end(batch, stall):
        for other in late:
            _drop(batch, other)
        _observe(batch, signs)
    else:
        end_round(batch, signs[0])
        for sign in signs[1:]:
            incidents.add(batch, sign)
    _join_located(batch)


def _may_end(batch: Batch, stall: OpenStall | Report) -> bool:
    return stall.is_fatal and batch.control.enforces("restart", otherwise=True)


def _observe(batch: Batch, signs: Sequence[Sign]) -> None:
    """Open an incident for ranks that stand still, and leave their round as it is."""
    before = batch.state.doc.incident
    incident = [incidents.add(batch, sign) for sign in signs][-1]
    ranks = {*incident.stalled, *(sign.rank for sign in signs if sign.rank is not None)}
    incident = replace(incident, stalled=tuple(sorted(ranks)))
    batch.state.set(incident=incident)
    if before is None or (incident.stalled and not before.stalled):
        only_say(
            batch,
            "restart",
            f"{signs[0].reason}; restarts for stalls only observe",
            rule="restart.observe",
            incident=incident.id,
            evidence=(signs[0].trigger_fact,) if signs[0].trigger_fact else (),
        )
        _collect(batch, incident.id, signs[0].reason)


def _collect(batch: Batch, incident: str, reason: str) -> None:
    """Let agents look into the ranks that stand: without that, few stalls have a cause."""
    order = CollectEvidence(
        **batch.order_head(batch.now.new_id()), reason=reason, incident=incident,
        evidence=(), within_s=batch.settings.stall_evidence_s,
    )  # fmt: skip
    batch.send(order)


def _opened(batch: Batch, report: Report) -> OpenStall:
    id = batch.now.new_id()
    waited_s = (report.waited_s or report.last_progress_age_s or 0.0) + report.age_s
    stall = OpenStall(**{**shared(OpenStall, report), "waited_s": waited_s}, id=id, span=id)
    batch.timers.start("stalled", stall.id)
    return stall


def _waited_s(batch: Batch, stall: OpenStall) -> float:
    batch.timers.start("stalled", stall.id)
    return stall.waited_s + batch.timers.elapsed("stalled", stall.id)


def _sign(batch: Batch, stall: OpenStall) -> Sign:
    return Sign(
        "rank_stalled",
        stall.reason,
        node=stall.node,
        rank=stall.rank,
        trigger_fact=stall.fact,
        fingerprint=stall.fingerprint,
        step=stall.step,
        detect_s=_waited_s(batch, stall),
        injected_by=stall.injected_by,
    )


def _all_save(batch: Batch) -> bool:
    """Whether the ranks have an order to save and end, which may take long."""
    saving = batch.state.doc.saving
    return saving is not None and saving.then_stop and saving.after_step is not None


def _found(batch: Batch, rank: int | None) -> list[OpenStall]:
    return [stall for stall in batch.state.doc.stalls if stall.rank == rank]


def _put(batch: Batch, stall: OpenStall) -> None:
    stalls = batch.state.doc.stalls
    batch.state.set(stalls=tuple(stall if other.id == stall.id else other for other in stalls))


def _drop(batch: Batch, stall: OpenStall) -> None:
    left = tuple(other for other in batch.state.doc.stalls if other.id != stall.id)
    if left != batch.state.doc.stalls:
        batch.state.set(stalls=left)
