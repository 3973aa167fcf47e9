"""What people, health, attribution and the catalog may ask for."""

from msgspec.structs import replace

from everstep.messages import (
    CollectEvidence,
    CopyReplica,
    Done,
    DrainNode,
    LeaveJob,
    OperatorActed,
    Peer,
    RequestChecks,
    RequestCopy,
    RequestEvidence,
    RequestSave,
    RestartJob,
    RunChecks,
    SaveCheckpoint,
    Seat,
    StopJob,
)
from everstep.messages.documents import PlannedEnd
from everstep_services.rendezvous.domain.ending import end_job, end_round
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.state import AT_WORK, OVER
from everstep_services.rendezvous.domain.turn import Turn

Request = (
    StopJob | RestartJob | DrainNode | RequestSave | RequestEvidence | RequestChecks | RequestCopy
)
_DO_NOT_RESTART = 93
DISMISSED = 0
"""What the agent of a drained node exits with: another code would end the whole Slurm step."""


def request(turn: Turn, ask: Request) -> Done:
    """Do it, or say why not; either is on record where a person asked."""
    if isinstance(ask, StopJob):
        return _stop(turn, ask)
    if isinstance(ask, RestartJob):
        return _restart(turn, ask)
    if isinstance(ask, DrainNode):
        return _drain(turn, ask)
    return _save(turn, ask) if isinstance(ask, RequestSave) else _pass_on(turn, ask)


def _pass_on(turn: Turn, ask: RequestEvidence | RequestChecks | RequestCopy) -> Done:
    if isinstance(ask, RequestEvidence):
        return _evidence(turn, ask)
    return _checks(turn, ask) if isinstance(ask, RequestChecks) else _copy(turn, ask)


def settle(turn: Turn) -> None:
    """End the round when those who were to save have had their time."""
    doc = turn.state.doc
    planned = doc.planned
    if planned is None or doc.phase not in {"forming", "running"}:
        return
    left_s = planned.within_s - turn.since("planned", doc.round)
    if left_s > 0:
        turn.wake_in(left_s)
        return
    turn.memory.forget("planned", doc.round)
    sign = Sign(planned.cause, planned.reason, node=planned.node)
    end_round(turn, planned.cause, sign)
    if planned.exit_code is not None:
        end_job(turn, "stopped", planned.exit_code, planned.reason)


def dismiss(turn: Turn) -> None:
    """Send away the nodes that are to be replaced, as soon as none of their ranks is left."""
    doc = turn.state.doc
    for seat in turn.state.leaving:
        if doc.phase in OVER or turn.memory.known("dismissed", seat.instance) is not None:
            continue
        turn.since("dismissed", seat.instance)
        order = LeaveJob(
            id=turn.now.new_id(),
            job=doc.job,
            round=doc.round,
            reason=f"{seat.node} is replaced",
            exit_code=DISMISSED,
            state="excluded",
        )
        turn.send(order, seat)


def _stop(turn: Turn, ask: StopJob) -> Done:
    doc = turn.state.doc
    if doc.phase in OVER:
        return _acted(turn, ask.by, "stop_job", "", ask.reason, "it was over already")
    reason = f"{ask.by} stopped the job: {ask.reason}"
    done = _acted(turn, ask.by, "stop_job", "", ask.reason, "")
    _end(turn, reason, save=ask.save_first, then_stop=True, exit_code=_DO_NOT_RESTART)
    return done


def _restart(turn: Turn, ask: RestartJob) -> Done:
    doc = turn.state.doc
    if ask.round != doc.round or doc.phase not in {"forming", "running"}:
        refused = f"round {ask.round} does not run: the job is at round {doc.round}, {doc.phase}"
        return _acted(turn, ask.by, "restart_job", "", ask.reason, refused)
    for node in ask.without_nodes:
        seat = turn.state.seat(node)
        if seat is not None:
            turn.state.put(replace(seat, is_leaving=True))
    done = _acted(turn, ask.by, "restart_job", " ".join(ask.without_nodes), ask.reason, "")
    reason = f"{ask.by} asked for another round: {ask.reason}"
    _end(turn, reason, save=ask.save_first, then_stop=False, exit_code=None)
    return done


def _drain(turn: Turn, ask: DrainNode) -> Done:
    seat = turn.state.seat(ask.node)
    if seat is None or turn.state.doc.phase in OVER:
        return _acted(turn, ask.by, "drain_node", ask.node, ask.reason, "it is not here")
    done = _acted(turn, ask.by, "drain_node", ask.node, ask.reason, "")
    turn.state.put(replace(seat, is_leaving=True))
    if seat.stage in AT_WORK:
        reason = f"{ask.by} drains {ask.node}: {ask.reason}"
        within_s = ask.within_s or 0.0
        if within_s:
            _order_save(turn, reason, within_s=within_s, then_stop=False)
        planned = PlannedEnd(cause="operator", reason=reason, within_s=within_s, node=ask.node)
        turn.state.set(planned=planned)
        settle(turn)
    return done


def _save(turn: Turn, ask: RequestSave) -> Done:
    if turn.state.doc.phase != "running":
        return _acted(turn, ask.by, "save", "", ask.reason, "no round runs")
    done = _acted(turn, ask.by, "save", "", ask.reason, "")
    _order_save(turn, f"{ask.by}: {ask.reason}", within_s=None, then_stop=False)
    return done


def _end(turn: Turn, reason: str, *, save: bool, then_stop: bool, exit_code: int | None) -> None:
    doc = turn.state.doc
    if doc.phase not in {"forming", "running"}:
        if exit_code is not None:
            end_job(turn, "stopped", exit_code, reason)
        return
    can_save = save and doc.phase == "running"
    within_s = turn.settings.save_within_s if can_save else 0.0
    if can_save:
        _order_save(turn, reason, within_s=within_s, then_stop=then_stop)
    planned = PlannedEnd(cause="operator", reason=reason, within_s=within_s, exit_code=exit_code)
    turn.state.set(planned=planned)
    settle(turn)


def _order_save(turn: Turn, reason: str, *, within_s: float | None, then_stop: bool) -> None:
    doc = turn.state.doc
    turn.send(
        SaveCheckpoint(
            id=turn.now.new_id(),
            job=doc.job,
            round=doc.round,
            reason=reason,
            occasion="requested",
            then_stop=then_stop,
            within_s=within_s,
        )
    )


def _evidence(turn: Turn, ask: RequestEvidence) -> Done:
    doc, state = turn.state.doc, turn.state
    if ask.round != doc.round or doc.phase not in {"forming", "running", "ending"}:
        return Done(text=f"round {ask.round} is over: its ranks are gone")
    order = CollectEvidence(
        id=turn.now.new_id(),
        job=doc.job,
        round=doc.round,
        reason=ask.reason or "evidence is asked for",
        incident=ask.incident,
        evidence=ask.evidence,
        within_s=ask.within_s,
        ranks=ask.ranks,
    )
    wanted = [seat for seat in state.members if _is_wanted(turn, seat, ask)]
    for seat in wanted:
        turn.send(order, seat)
    return Done(text=f"asked {len(wanted)} nodes")


def _is_wanted(turn: Turn, seat: Seat, ask: RequestEvidence) -> bool:
    if seat.stage == "gone" or (ask.nodes and seat.node not in ask.nodes):
        return False
    if not ask.ranks:
        return True
    first = turn.state.first_rank(seat.node)
    return any(first <= rank < first + seat.ranks for rank in ask.ranks)


def _checks(turn: Turn, ask: RequestChecks) -> Done:
    doc = turn.state.doc
    seats = [turn.state.seat(node) for node in ask.nodes]
    here = [seat for seat in seats if seat is not None]
    for seat in here:
        order = RunChecks(
            id=turn.now.new_id(),
            job=doc.job,
            round=doc.round,
            reason=f"{ask.by}: {ask.reason}",
            checks=ask.checks,
        )
        turn.send(order, seat)
    return Done(text=f"asked {len(here)} of {len(ask.nodes)} nodes")


def _copy(turn: Turn, ask: RequestCopy) -> Done:
    doc, to = turn.state.doc, turn.state.seat(ask.to)
    if ask.round != doc.round:
        return Done(text=f"round {ask.round} is over: nothing was ordered")
    holder = turn.state.seat(ask.holder)
    if to is None or to.replica_port is None or holder is None:
        return Done(text=f"{ask.holder} or {ask.to} is not here: nothing was ordered")
    peer = Peer(node=to.node, slot=to.slot or 0, address=to.address, port=to.replica_port)
    order = CopyReplica(
        id=turn.now.new_id(),
        job=doc.job,
        round=doc.round,
        reason=ask.reason,
        owner_slot=ask.owner_slot,
        step=ask.step,
        to=peer,
    )
    turn.send(order, holder)
    return Done(text=f"asked {ask.holder}")


def _acted(turn: Turn, by: str, action: str, target: str, reason: str, refused: str) -> Done:
    turn.fact(
        OperatorActed,
        by=by,
        action=action,
        target=target,
        outcome="refused" if refused else "accepted",
        reason=f"{reason}; {refused}" if refused else reason,
    )
    return Done(text=f"refused: {refused}" if refused else "ordered")
