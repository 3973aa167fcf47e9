"""Agents that are gone: found out by a probe, by health, or because they said so."""

from msgspec.structs import replace

from everstep.messages import NodeLost, Seat
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Turn
from everstep_services.rendezvous.domain.ends import end_round
from everstep_services.rendezvous.domain.events import Probe, Probed
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.state import AT_WORK, OVER


def probed(turn: Turn, found: Probed) -> None:
    """An agent gave a sign of life, or is gone."""
    if found.is_there:
        turn.memory.answered[found.instance] = turn.now.s
        return
    reason = f"{found.node} is gone: nobody hears it, its connection to the bus is closed"
    _gone(turn, found.node, found.instance, reason)


def lost(turn: Turn, finding: NodeLost) -> None:
    """Health says that a node is lost: silent past its limit, and nothing speaks for it."""
    seat = turn.state.seat(finding.node)
    if seat is None:
        return
    # Another replica may have heard it; or it is a new agent, of which the finding does not tell.
    heard = turn.memory.heard.setdefault(seat.instance, turn.now.s)
    if turn.now.s - heard < finding.limit_s:
        return  # it spoke to us since; health says it again
    _gone(turn, finding.node, seat.instance, finding.reason, finding.id, finding.silence_s)


def fell_away(turn: Turn, seat: Seat, sign: Sign) -> None:
    """A node is no longer there; if a round needed it, that round is over."""
    state, doc = turn.state, turn.state.doc
    turn.memory.forget_agent(seat.instance)
    if doc.phase in OVER:
        state.drop(seat.node)
        return
    if seat.stage == "finished" and doc.phase in {"forming", "running"}:
        # Its ranks have done their part; the slot counts as finished without its agent.
        state.put(replace(seat, instance=""))
        return
    if seat.slot is None:
        state.drop(seat.node)
        return
    state.put(replace(seat, stage="gone"))
    member_lost(turn, seat, sign)


def member_lost(turn: Turn, seat: Seat, sign: Sign) -> None:
    """What the round has lost ends it, or belongs to the incident that ended it."""
    doc = turn.state.doc
    if doc.phase in {"forming", "running"} and seat.stage in AT_WORK:
        end_round(turn, sign.trigger, sign)
    elif doc.phase == "ending" and doc.incident is not None and not doc.incident.is_decided:
        incidents.add(turn, sign)


def look_for_signs(turn: Turn) -> None:
    """Ask those who owe us an answer for a sign of life, and spares before they are needed."""
    owing = _owing(turn)
    if not owing:
        return
    settings, now = turn.settings, turn.now.s
    left_s = settings.probe_after_s - turn.phase_s
    if left_s > 0:
        turn.wake_in(left_s)
        return
    began, due = now - turn.phase_s, []
    for seat in owing:
        heard = max(turn.memory.heard.get(seat.instance, began), began)
        next_at = max(heard + settings.probe_after_s, _again_at(turn, seat))
        if next_at <= now:
            due.append(seat)
        else:
            turn.wakes.append(next_at)
    for seat in due[: settings.probes_at_once]:
        turn.memory.probed[seat.instance] = now
        turn.probes.append(Probe(seat.node, seat.instance, turn.order_for(seat)))
        turn.wake_in(settings.probe_every_s)
    if len(due) > settings.probes_at_once:
        turn.wake_in(settings.probe_after_s)


def _owing(turn: Turn) -> list[Seat]:
    state, doc = turn.state, turn.state.doc
    if doc.phase in OVER:
        return list(state.seats)
    owing = state.in_stage("stopping", "absent")
    if doc.phase == "forming":
        owing += state.in_stage("starting")
    elif doc.phase == "ending" and doc.incident is not None:
        owing += [seat for seat in state.in_stage("idle") if seat.slot is None]
    return owing


def _again_at(turn: Turn, seat: Seat) -> float:
    probed_at = turn.memory.probed.get(seat.instance)
    return 0.0 if probed_at is None else probed_at + turn.settings.probe_every_s


def _gone(
    turn: Turn,
    node: str,
    instance: str,
    reason: str,
    fact: str | None = None,
    detect_s: float = 0.0,
) -> None:
    seat = turn.state.seat(node)
    if seat is None or seat.instance != instance or seat.stage == "gone":
        return
    sign = Sign("node_lost", reason, node=node, fact=fact, detect_s=detect_s)
    fell_away(turn, seat, sign)
