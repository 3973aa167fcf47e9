"""Agents that are gone, according to a probe, to health, or to themselves."""

import dataclasses
from math import inf

from msgspec.structs import replace

from everstep.messages import NodeLost, Seat
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import only_say
from everstep_services.rendezvous.domain.ends import end_round
from everstep_services.rendezvous.domain.events import LivenessProbe, Probed
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.state import AT_WORK, OVER, with_stage

_SLACK_S = 0.2
"""A node that was heard this long after a round's end was there when the round ended."""
_CLOSED_FOR_S = 10.0
"""Where silence ends no round, a connection must be closed for this long: agents reconnect."""


def probed(batch: Batch, probe: Probed) -> None:
    """Act on the result of a probe: the agent answered, or is gone."""
    if probe.is_there:
        batch.memory.answered[probe.instance] = batch.now.s
        return
    seat = batch.state.seat(probe.node)
    if seat is not None and _is_held(batch, seat) and not _stays_closed(batch, probe.instance):
        return
    reason = f"{probe.node} is gone: its connection to the bus is closed"
    _gone(batch, probe.instance, Sign("node_lost", reason, node=probe.node))


def lost(batch: Batch, finding: NodeLost) -> None:
    """Act on health's finding that a node is lost: silent past its limit, and not reachable."""
    seat = batch.state.seat(finding.node)
    if seat is None:
        return
    # Another replica may have heard it, or a new agent runs there that the finding does not name.
    heard = batch.memory.heard.setdefault(seat.instance, batch.now.s)
    if batch.now.s - heard < finding.limit_s:
        return  # it has spoken to us since; health repeats its finding
    if _is_held(batch, seat):
        _hold(batch, seat, finding)
        return
    sign = Sign(
        "node_lost", finding.reason, node=finding.node, trigger_fact=finding.id,
        detect_s=finding.silence_s, is_later=finding.is_warden_alive,
    )  # fmt: skip
    _gone(batch, seat.instance, sign)


def _is_held(batch: Batch, seat: Seat) -> bool:
    """The node may live and its round run on: silence is a judgement, and may end no round."""
    is_at_work = batch.state.doc.phase in {"forming", "running"} and seat.stage in AT_WORK
    return is_at_work and not batch.control.enforces("restart", otherwise=True)


def _hold(batch: Batch, seat: Seat, finding: NodeLost) -> None:
    if _again_at(batch, seat) <= batch.now.s:  # health reminds us of its finding once a second
        batch.memory.probed[seat.instance] = batch.now.s
        batch.probes.append(LivenessProbe(seat.node, seat.instance, batch.order_for(seat)))
    if batch.timers.is_running("observed", finding.id):
        return
    batch.timers.start("observed", finding.id)
    reason = f"{finding.reason}; silence ends no round now, a closed connection does"
    only_say(batch, "restart", reason, rule="restart.observe", evidence=(finding.id,))


def _stays_closed(batch: Batch, instance: str) -> bool:
    """Whether probe after probe found the agent's connection closed, for long enough."""
    timers, memory = batch.timers, batch.memory
    heard = max(memory.heard.get(instance, -inf), memory.answered.get(instance, -inf))
    last = timers.started_at("refused", instance)
    is_first = last is None or heard >= last
    if is_first or timers.elapsed("refused", instance) > 3 * batch.settings.probe_every_s:
        timers.restart("closed", instance)
    timers.restart("refused", instance)
    return timers.elapsed("closed", instance) >= _CLOSED_FOR_S


def fell_away(batch: Batch, seat: Seat, sign: Sign) -> None:
    """Remove a node that is gone; a round that needed it is over."""
    state, doc = batch.state, batch.state.doc
    heard_ago_s = batch.now.s - batch.memory.heard.get(seat.instance, -inf)
    if sign.trigger == "node_lost":
        silent_s = min(sign.detect_s or inf, heard_ago_s)
        is_later = sign.is_later or silent_s < batch.phase_s - _SLACK_S
        sign = dataclasses.replace(sign, is_later=is_later and doc.phase == "ending")
    batch.forget_agent(seat.instance)
    if doc.phase in OVER:
        state.drop(seat.node)
        return
    if seat.stage == "finished" and doc.phase in {"forming", "running"}:
        # Its ranks have finished; the slot counts as finished without its agent.
        state.put(replace(seat, instance=""))
        return
    if seat.slot is None:
        state.drop(seat.node)
        return
    state.put(with_stage(seat, "gone"))
    member_lost(batch, seat, sign)


def member_lost(batch: Batch, seat: Seat, sign: Sign) -> None:
    """End the round that lost a member, or add the loss to the incident that ended it."""
    doc = batch.state.doc
    if doc.phase in {"forming", "running"} and seat.stage in AT_WORK:
        end_round(batch, sign)
    elif seat.is_leaving and seat.stage == "idle":
        return  # it was sent away: its end explains nothing
    elif doc.phase == "ending" and doc.incident is not None:
        incidents.add(batch, sign)


def look_for_signs(batch: Batch) -> None:
    """Probe agents that owe an answer, spares before they are needed, and unheard members."""
    owing = _owing(batch) + _unheard(batch)
    if not owing:
        return
    settings, now = batch.settings, batch.now.s
    left_s = settings.probe_after_s - batch.phase_s
    if left_s > 0:
        batch.wake_in(left_s)
        return
    began, due = now - batch.phase_s, []
    for seat in owing:
        heard = max(batch.memory.heard.get(seat.instance, began), began)
        next_at = max(heard + settings.probe_after_s, _again_at(batch, seat))
        if next_at <= now:
            due.append(seat)
        else:
            batch.wakes.append(next_at)
    for seat in due[: settings.probes_at_once]:
        batch.memory.probed[seat.instance] = now
        batch.probes.append(LivenessProbe(seat.node, seat.instance, batch.order_for(seat)))
        batch.wake_in(settings.probe_every_s)
    if len(due) > settings.probes_at_once:
        batch.wake_in(settings.probe_after_s)


def _owing(batch: Batch) -> list[Seat]:
    state, doc = batch.state, batch.state.doc
    if doc.phase in OVER:
        return list(state.seats)
    owing = state.in_stage("stopping", "absent")
    if doc.phase == "forming":
        owing += state.in_stage("starting")
    elif doc.phase == "ending" and doc.incident is not None:
        owing += [seat for seat in state.in_stage("idle") if seat.slot is None]
    return owing


def _unheard(batch: Batch) -> list[Seat]:
    """Members of a running round that this replica has taken over, and that it has never heard.

    Health does not know them either, if it was started again together with this replica.
    """
    state, memory = batch.state, batch.memory
    if state.doc.phase != "running" or batch.timers.elapsed("awake") > batch.phase_s:
        return []
    instances = memory.heard.keys() | memory.answered.keys()
    unheard = [
        s for s in state.seats if s.stage in AT_WORK and s.instance and s.instance not in instances
    ]
    left_s = batch.settings.unheard_after_s - batch.phase_s
    if unheard and left_s > 0:
        batch.wake_in(left_s)
        return []
    return unheard


def _again_at(batch: Batch, seat: Seat) -> float:
    probed_at = batch.memory.probed.get(seat.instance)
    return 0.0 if probed_at is None else probed_at + batch.settings.probe_every_s


def _gone(batch: Batch, instance: str, sign: Sign) -> None:
    seat = None if sign.node is None else batch.state.seat(sign.node)
    if seat is None or seat.instance != instance or seat.stage == "gone":
        return
    fell_away(batch, seat, sign)
