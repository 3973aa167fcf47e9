"""The requests of people, health, attribution and the catalog."""

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from everstep.incident_causes import NUMERICS, IncidentCause
from everstep.messages import (
    CollectEvidence,
    CopyReplica,
    Done,
    DrainNode,
    LeaveJob,
    MeasureNetwork,
    Peer,
    ReleaseImages,
    RequestChecks,
    RequestCopy,
    RequestEvidence,
    RequestMeasurement,
    RequestRelease,
    RequestSave,
    RestartJob,
    RunChecks,
    Seat,
    StopJob,
    operator_acted,
)
from everstep.messages.base import shared
from everstep.messages.documents.rounds import PlannedEnd, RoundDocument
from everstep_services.rendezvous.domain import agreed_save
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.ends import (
    NOT_ENOUGH_NODES,
    PREEMPTED,
    RETRYABLE,
    end_job,
    end_round,
)
from everstep_services.rendezvous.domain.formation import candidate_of, world_of
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.network.pair_test import peers
from everstep_services.rendezvous.domain.placement import largest_size
from everstep_services.rendezvous.domain.state import AT_WORK, OVER

OperatorRequest = (
    StopJob
    | RestartJob
    | DrainNode
    | RequestSave
    | RequestChecks
    | RequestMeasurement
    | RequestEvidence
)
"""Requests that are recorded together with the person who made them."""
ServiceRequest = RequestCopy | RequestRelease
"""Requests of services."""
Request = OperatorRequest | ServiceRequest
_ACTIONS: Mapping[type[OperatorRequest], str] = {
    StopJob: "stop_job",
    RestartJob: "restart_job",
    DrainNode: "drain_node",
    RequestSave: "save",
    RequestChecks: "check_nodes",
    RequestMeasurement: "measure_network",
    RequestEvidence: "capture",
}
_DO_NOT_RESTART = 93
_CONTINUED = frozenset({RETRYABLE, PREEMPTED, NOT_ENOUGH_NODES})
"""Exit codes of allocations whose job another allocation may continue, until a person stops it."""
_TURN_S = 4.0
"""One measurement sends for a second; the rest of the turn is for late nodes and slow links."""
_NODES_MOST = 4096
"""All of them must fit into one order."""
_NAMED_MOST = 20


def request(batch: Batch, ask: Request) -> Done:
    """Carry out a request, or answer why not; requests of people are recorded either way."""
    if isinstance(ask, StopJob):
        return _stop(batch, ask)
    if isinstance(ask, RestartJob):
        return _restart(batch, ask)
    if isinstance(ask, DrainNode):
        return _drain(batch, ask)
    return _save(batch, ask) if isinstance(ask, RequestSave) else _pass_on(batch, ask)


def _pass_on(
    batch: Batch, ask: RequestEvidence | RequestChecks | RequestMeasurement | ServiceRequest
) -> Done:
    match ask:
        case RequestEvidence():
            return _evidence(batch, ask)
        case RequestChecks():
            return _checks(batch, ask)
        case RequestMeasurement():
            return _measurement(batch, ask)
        case RequestCopy():
            return _copy(batch, ask)
        case RequestRelease():
            return _release(batch, ask)


def dismiss(batch: Batch) -> None:
    """Send away the nodes that must be replaced, as soon as none of their ranks is left."""
    doc = batch.state.doc
    for seat in batch.state.leaving:
        if doc.phase in OVER or batch.timers.is_running("dismissed", seat.instance):
            continue
        batch.timers.start("dismissed", seat.instance)
        exit_code, reason = dismissal(batch, seat)
        order = LeaveJob(
            **batch.order_head(batch.now.new_id()),
            reason=reason,
            exit_code=exit_code,
            state="excluded",
        )
        batch.send(order, seat)


def dismissal(batch: Batch, seat: Seat) -> tuple[int, str]:
    """Return the exit code of the agent of a node that must leave, and the reason.

    The code is 0 where the others can continue: any other code would end a whole Slurm step.
    """
    stay = [other for other in batch.state.seats if other.stage != "gone" and not other.is_leaving]
    why = seat.leaves_because or f"{seat.node} must leave"
    if largest_size([candidate_of(other) for other in stay], world_of(batch)):
        return 0, f"{why}; the others continue without it"
    return RETRYABLE, f"{why}; the job needs another node: requeue it"


def _stop(batch: Batch, ask: StopJob) -> Done:
    doc = batch.state.doc
    if doc.phase in OVER and not (doc.phase == "stopped" and doc.exit_code in _CONTINUED):
        return _refused(batch, ask, f"the job is over already: {doc.reason}")
    within_s = _save_time(batch, ask.save_first)
    left = f"the job is stopped, and its agents exit with {_DO_NOT_RESTART}"
    done = _accepted(batch, ask, f"{_ends(batch, within_s)}; {left}")
    reason = f"{ask.by} stopped the job: {ask.reason}"
    if doc.phase in {"forming", "running"}:
        _end(batch, reason, within_s, exit_code=_DO_NOT_RESTART)
    else:
        end_job(batch, "stopped", _DO_NOT_RESTART, reason)
    return done


def _restart(batch: Batch, ask: RestartJob) -> Done:
    doc = batch.state.doc
    if ask.round != doc.round or doc.phase not in {"forming", "running"}:
        return _refused(batch, ask, f"round {ask.round} does not run: {_present(doc)}")
    if why := _strangers(_nodes(batch), ask.without_nodes):
        return _refused(batch, ask, why)
    if why := agreed_save.overruled(batch):
        return _refused(batch, ask, f"no round follows round {doc.round}: {why}")
    within_s = _save_time(batch, ask.save_first)
    free = "another round follows, and does not count against the restart budget"
    left = f", without {', '.join(ask.without_nodes)}" if ask.without_nodes else ""
    done = _accepted(batch, ask, f"{_ends(batch, within_s)}; {free}{left}")
    for node in ask.without_nodes:
        seat = batch.state.seat(node)
        if seat is not None:
            batch.state.send_away(seat, f"{ask.by} restarted without {node}: {ask.reason}")
    reason = f"{ask.by} asked for another round: {ask.reason}"
    _end(batch, reason, within_s, cause=_cause(ask))
    return done


def _cause(ask: RestartJob | DrainNode) -> IncidentCause:
    """A result that cannot be right is an incident; what a person wants is not."""
    return NUMERICS if ask.origin == NUMERICS else "operator"


def _strangers(here: Collection[str], nodes: Iterable[str]) -> str:
    """Say which of these nodes take no part in the job; empty if all do."""
    strangers = [node for node in nodes if node not in here]
    return f"{_named(strangers)} takes no part in the job" if strangers else ""


def _nodes(batch: Batch) -> set[str]:
    return {seat.node for seat in batch.state.seats}


def _present(doc: RoundDocument) -> str:
    if doc.phase == "joining":
        return f"the job waits for the nodes of round {doc.round + 1}"
    return f"the job is at round {doc.round}, {doc.phase}"


def _drain(batch: Batch, ask: DrainNode) -> Done:
    seat = batch.state.seat(ask.node)
    if batch.state.doc.phase in OVER:
        return _refused(batch, ask, f"the job is over already: {batch.state.doc.reason}")
    if seat is None:
        return _refused(batch, ask, f"{ask.node} takes no part in the job")
    why = f"{ask.by} drains {ask.node}: {ask.reason}"
    batch.state.send_away(seat, why)
    exit_code, _ = dismissal(batch, seat)
    left = f"{ask.node} leaves, and its agent exits with {exit_code}"
    rest = "the others continue without it" if exit_code == 0 else "the job then needs another node"
    if seat.stage not in AT_WORK:
        return _accepted(batch, ask, f"{left}; {rest}")
    can_move = batch.state.doc.survives > 1 and batch.state.doc.planned is None
    if can_move and batch.state.doc.phase == "running" and ask.origin != NUMERICS:
        done = _accepted(batch, ask, f"the ranks keep their states; {left}; {rest}")
        end_round(batch, Sign("operator", why, node=ask.node), keeps=True)
        return done
    within_s = (ask.within_s or 0.0) if batch.state.doc.phase == "running" else 0.0
    within_s = agreed_save.time_left(batch, within_s)
    left = agreed_save.overruled(batch) or f"{left}; {rest}"
    done = _accepted(batch, ask, f"{_ends(batch, within_s)}; {left}")
    _end(batch, why, within_s, node=ask.node, cause=_cause(ask))
    return done


def _save(batch: Batch, ask: RequestSave) -> Done:
    doc = batch.state.doc
    if doc.phase != "running":
        return _refused(batch, ask, f"no round runs: {_present(doc)}")
    done = _accepted(
        batch,
        ask,
        f"the ranks of round {doc.round} are asked to save after one of their next steps",
    )
    reason = f"{ask.by}: {ask.reason}"
    agreed_save.ask(batch, reason, "requested", within_s=None, then_stop=False)
    return done


def _end(
    batch: Batch,
    reason: str,
    within_s: float,
    *,
    node: str | None = None,
    exit_code: int | None = None,
    cause: IncidentCause = "operator",
) -> None:
    planned = PlannedEnd(
        cause=cause, reason=reason, within_s=within_s, node=node, exit_code=exit_code
    )
    agreed_save.end_after_save(batch, planned)


def _save_time(batch: Batch, is_wanted: bool) -> float:
    """Return how long the round may continue to save; 0 if none runs."""
    can_save = is_wanted and batch.state.doc.phase == "running"
    return agreed_save.time_left(batch, batch.settings.save_within_s if can_save else 0.0)


def _ends(batch: Batch, within_s: float) -> str:
    doc = batch.state.doc
    if doc.phase not in {"forming", "running"}:
        return "no round runs"
    if not within_s:
        return f"round {doc.round} ends"
    standing = () if doc.incident is None else doc.incident.stalled
    named = ", ".join(map(str, standing))
    still = f"; standing still: rank {named}; without a save it ends at once" if standing else ""
    return f"round {doc.round} has {within_s:g} s to save, then ends{still}"


def _evidence(batch: Batch, ask: RequestEvidence) -> Done:
    doc, state = batch.state.doc, batch.state
    if ask.round not in {0, doc.round} or doc.phase not in {"forming", "running", "ending"}:
        why = f"round {ask.round or doc.round} is over: its ranks are gone"
        return _refused(batch, ask, why) if ask.origin else Done(text=why)
    why = f"{ask.by}: {ask.reason or 'evidence was requested'}"
    head = {**batch.order_head(batch.now.new_id()), "reason": why}
    order = CollectEvidence(**{**shared(CollectEvidence, ask), **head})
    if ask.origin and (why := _strangers(_nodes(batch), ask.nodes)):
        return _refused(batch, ask, why)
    wanted = [seat for seat in state.members if _is_wanted(batch, seat, ask)]
    for seat in wanted:
        batch.send(order, seat)
    text = f"asked {len(wanted)} node{'' if len(wanted) == 1 else 's'} of round {doc.round}"
    if not ask.origin:  # a service, which records in its own facts why it asks
        return Done(text=text)
    if not wanted:
        return _refused(batch, ask, "no node of the job has such ranks")
    return _accepted(batch, ask, text)


def _is_wanted(batch: Batch, seat: Seat, ask: RequestEvidence) -> bool:
    if seat.stage == "gone" or (ask.nodes and seat.node not in ask.nodes):
        return False
    if not ask.ranks:
        return True
    first = batch.state.first_rank(seat.node)
    return any(first <= rank < first + seat.ranks for rank in ask.ranks)


def _checks(batch: Batch, ask: RequestChecks) -> Done:
    seats = [batch.state.seat(node) for node in ask.nodes]
    here = [seat for seat in seats if seat is not None]
    if ask.origin and (why := _strangers(_nodes(batch), ask.nodes)):
        return _refused(batch, ask, why)
    for seat in here:
        head, reason = batch.order_head(batch.now.new_id()), f"{ask.by}: {ask.reason}"
        batch.send(RunChecks(**head, reason=reason, checks=ask.checks), seat)
    text = f"asked {len(here)} of {len(ask.nodes)} nodes"
    if not ask.origin:  # a service, which records in its own facts why it asks
        return Done(text=text)
    return _accepted(batch, ask, text)


def _measurement(batch: Batch, ask: RequestMeasurement) -> Done:
    order = _network_test(batch, ask)
    if isinstance(order, str):
        return _refused(batch, ask, order)
    batch.send(order)
    return _accepted(batch, ask, _network_test_text(order))


def _copy(batch: Batch, ask: RequestCopy) -> Done:
    doc, to = batch.state.doc, batch.state.seat(ask.to)
    if ask.round != doc.round:
        return Done(text=f"round {ask.round} is over: nothing was ordered")
    holder = batch.state.seat(ask.holder)
    if to is None or to.replica_port is None or holder is None:
        return Done(text=f"{ask.holder} or {ask.to} is not here: nothing was ordered")
    peer = Peer(node=to.node, slot=to.slot or 0, address=to.address, port=to.replica_port)
    order = CopyReplica(
        **batch.order_head(batch.now.new_id()),
        reason=ask.reason,
        owner_slot=ask.owner_slot,
        step=ask.step,
        to=peer,
    )
    batch.send(order, holder)
    return Done(text=f"asked {ask.holder}")


def _release(batch: Batch, ask: RequestRelease) -> Done:
    if batch.state.doc.phase in OVER:
        return Done(text="the job is over, and its states in memory are released", is_refused=True)
    head = batch.order_head(batch.now.new_id())
    batch.send(ReleaseImages(**head, reason=ask.reason, step=ask.step, by=ask.by))
    return Done(text="all nodes are asked")


def _accepted(batch: Batch, ask: OperatorRequest, text: str) -> Done:
    _say(batch, ask, "accepted", ask.reason)
    return Done(text=text)


def _refused(batch: Batch, ask: OperatorRequest, why: str) -> Done:
    _say(batch, ask, "refused", f"{ask.reason}; {why}")
    return Done(text=why, is_refused=True)


def _say(
    batch: Batch, ask: OperatorRequest, outcome: Literal["accepted", "refused"], reason: str
) -> None:
    subject = (_ACTIONS[type(ask)], _target(ask))
    batch.record(operator_acted(batch.head(), ask, subject, outcome, reason))


def _target(ask: OperatorRequest) -> str:
    match ask:
        case DrainNode():
            return ask.node
        case RequestChecks() | RequestMeasurement() | RequestEvidence():
            return " ".join(ask.nodes)
        case RestartJob():
            return " ".join(ask.without_nodes)
        case _:
            return ""


def _network_test(batch: Batch, ask: RequestMeasurement) -> MeasureNetwork | str:
    """Return the order to all agents, or the reason why nothing is measured."""
    here = {seat.node: seat for seat in batch.state.seats if seat.stage != "gone"}
    if why := _strangers(here, ask.nodes):
        return why
    seats = [here[node] for node in sorted(set(ask.nodes) or here)]
    if not 2 <= len(seats) <= _NODES_MOST:
        return f"{len(seats)} nodes would measure: name at least 2 nodes, and at most {_NODES_MOST}"
    busy = [seat.node for seat in seats if seat.stage != "idle"]
    if busy and not ask.is_beside_training:
        return (
            f"ranks run on {_named(busy)}: the test would slow them down, and they would distort "
            f"its figures. Name nodes without ranks, or accept that with --beside-training"
        )
    return MeasureNetwork(
        **batch.order_head(ask.test),
        reason=f"{ask.by}: {ask.reason}",
        peers=peers(seats, ask.test),
        token=batch.now.new_id() + batch.now.new_id(),
        turns=max(1, min(ask.partners, len(seats) - 1 + len(seats) % 2)),
        turn_s=_TURN_S,
    )


def _network_test_text(order: MeasureNetwork) -> str:
    """Describe the test for the person who asked."""
    turns = "1 turn" if order.turns == 1 else f"{order.turns} turns"
    return (
        f"{len(order.peers)} nodes measure the network in pairs, in {turns} of "
        f"{order.turn_s:g} s; the figures are recorded as facts"
    )


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _NAMED_MOST} more" if len(nodes) > _NAMED_MOST else ""
    return ", ".join(nodes[:_NAMED_MOST]) + more
