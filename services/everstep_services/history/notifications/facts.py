"""Which notices each kind of fact begins, changes and ends. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from everstep.messages import (
    ActionDecided,
    AllocationEnded,
    BreakerClosed,
    BreakerOpened,
    Fact,
    IncidentClosed,
    IncidentExtended,
    IncidentOpened,
    JobEnded,
    NodeExcluded,
    NodeIncluded,
    NodeLeft,
    NodeLost,
    OperatorActed,
    RoundEnded,
    StragglerCleared,
    StragglerFound,
    VerdictReached,
)
from everstep.messages.documents.notices import Notice
from everstep.observe.redaction import redact
from everstep.subjects import CLUSTER
from everstep_services.history.notifications.notices import Event, Notices

_WATCHED = "nothing: stalls are only observed, and the round goes on"
_NAMES_MOST = 16
_TEXT_MOST = 600
_READ_MOST = 4096
_NOT_ENOUGH_NODES = 92
"""The exit code of agents whose job did not get its nodes within `--join-timeout`."""
_BY_PEOPLE = frozenset({"rest", "cli", "script"})


def take(notices: Notices, fact: Fact, now: float) -> None:
    """Change the notices as a fact says; other facts change nothing."""
    if (reader := _READERS.get(type(fact))) is not None:
        reader(notices, fact, now)


def _opened(notices: Notices, fact: IncidentOpened, now: float) -> None:
    id_ = _incident_id(fact)
    notice = notices.open_or_new(id_, fact, now, "incident", fact.incident)
    if notice is None or notice.began_at is not None:
        return
    ranks = notice.ranks or (() if fact.rank is None else (fact.rank,))
    nodes = notice.nodes or (() if fact.node is None else (fact.node,))
    _begin(notices, notice, fact, ranks=ranks, nodes=nodes)


def _begin(notices: Notices, notice: Notice, fact: Any, **more: Any) -> None:
    """What a notice is about has begun; it is held for a while before it is sent."""
    begun = replace(notice, state="held", began_at=fact.at, reason=_bounded(fact.reason), **more)
    notices.put(begun)


def _end(
    notices: Notices, notice: Notice, fact: Any, outcome: str, before: str = "", **more: Any
) -> None:
    """It is over, for the reason of the fact."""
    ending = _bounded(f"{before}{fact.reason}")
    notices.end(replace(notice, outcome=outcome, ended_at=fact.at, ending=ending, **more))


def _extended(notices: Notices, fact: IncidentExtended, now: float) -> None:
    notice = notices.open_or_new(_incident_id(fact), fact, now, "incident", fact.incident)
    if notice is not None and fact.ranks > notice.affected:
        notices.put(replace(notice, affected=fact.ranks))


def _judged(notices: Notices, fact: VerdictReached, now: float) -> None:
    notice = notices.of_incident(fact.job, fact.incident) or notices.open_or_new(
        _incident_id(fact), fact, now, "incident", fact.incident
    )
    if notice is None or fact.revision <= notice.revision:
        return
    ranks, nodes = fact.culprit_ranks[:_NAMES_MOST], fact.culprit_nodes[:_NAMES_MOST]
    if fact.is_inconclusive or (ranks and not nodes and ranks == notice.ranks):
        nodes = notice.nodes
    if fact.is_inconclusive or (nodes and not ranks and nodes == notice.nodes):
        ranks = notice.ranks
    judged = replace(
        notice,
        revision=fact.revision,
        cause=fact.cause,
        verdict=_bounded(fact.reason),
        fingerprint=fact.fingerprint,
        is_inconclusive=fact.is_inconclusive,
        confidence=fact.confidence,
        ranks=ranks,
        nodes=nodes,
    )
    notices.put(judged)
    _note_repetition(notices, judged, fact)
    if judged.state == "firing" and judged.event == "incident":
        notices.note_sent(judged, now)


def _note_repetition(notices: Notices, later: Notice, fact: VerdictReached) -> None:
    """A recovery was none if the same failure ended its round, as `incident_outcomes` has it.

    A stall that is over, or a result that cannot be right, lets its round go on.
    """
    if not fact.fingerprint or fact.is_transient is not False or later.next_round == fact.round:
        return
    key = ("recovered", fact.job, fact.round, fact.fingerprint)
    for notice in notices.all():
        if notice.id == later.id:
            return  # the others are younger
        if (notice.outcome, notice.job, notice.next_round, notice.fingerprint) == key:
            ending = _bounded(f"then round {fact.round} ended in the same way")
            notices.put(replace(notice, outcome="repeated", ending=ending))


def _decided(notices: Notices, fact: ActionDecided, now: float) -> None:
    is_watched = fact.rule == "restart.observe"
    if fact.incident is None or not (fact.mode == "enforce" or is_watched):
        return
    id_ = f"{fact.job}/{fact.incident}"
    notice = notices.open_or_new(id_, fact, now, "incident", fact.incident)
    if notice is None or (is_watched and notice.action):
        return
    action = _WATCHED if is_watched else f"{fact.action}: {fact.reason}"
    notices.put(replace(notice, action=_bounded(action)))


def _closed(notices: Notices, fact: IncidentClosed, now: float) -> None:
    notice = notices.open_or_new(_incident_id(fact), fact, now, "incident", fact.incident)
    if notice is None or notice.outcome:
        return
    _end(
        notices, notice, fact, fact.outcome or "closed", lost_s=fact.ledger.wall_s + fact.lost_s,
        next_round=fact.next_round, lost_steps=fact.lost_steps,
    )  # fmt: skip


def _job_ended(notices: Notices, fact: JobEnded, now: float) -> None:
    for drain in notices.all():
        if (drain.event, drain.job) == ("node_drained", fact.job) and not drain.outcome:
            _end(notices, drain, fact, "job_over", "the job is over: ")
    if fact.state not in {"failed", "stopped"}:
        return
    id_ = f"{fact.job}/ended/{fact.id}"
    if fact.state == "stopped" and notices.take_expected_stop(fact.job):
        notices.finish(id_)
        return
    notice = notices.open_or_new(id_, fact, now, f"job_{fact.state}", fact.job)
    if notice is None or notice.began_at is not None:
        return
    _begin(notices, notice, fact, incident=fact.incident or "")


def _allocation_ended(notices: Notices, fact: AllocationEnded, now: float) -> None:
    """A job that gave up waiting for nodes may go on in another allocation, if a person starts one.

    Of several allocations that end together, one makes a notice.
    """
    if fact.state != "failed" or fact.exit_code != _NOT_ENOUGH_NODES:
        return
    id_ = f"{fact.job}/gave_up/{fact.id}"
    notice = notices.open_or_new(id_, fact, now, "job_stopped", fact.job)
    if notice is None or notice.began_at is not None:
        return
    held = ((other.event, other.job, other.state) for other in notices.all())
    if ("job_stopped", fact.job, "held") in held:
        notices.finish(id_)
        return
    _begin(notices, notice, fact)


def _operated(notices: Notices, fact: OperatorActed, now: float) -> None:
    if fact.action == "drain_node" and fact.outcome == "accepted":
        _drained(notices, fact, now)
        return
    is_stop = fact.action == "stop_job" and fact.outcome == "accepted"
    if not is_stop or fact.origin not in _BY_PEOPLE or notices.is_finished(fact.id):
        return
    notices.remember(fact.id)
    for notice in notices.all():
        if (notice.event, notice.job, notice.state) == ("job_stopped", fact.job, "held"):
            notices.finish(notice.id)
            return
    notices.expect_stop(fact.job)


def _drained(notices: Notices, fact: OperatorActed, now: float) -> None:
    """A node must leave its job. A second request for the same node makes no second notice."""
    id_ = f"{fact.job}/drained/{fact.id}"
    if any(notice.id != id_ for notice in _drains(notices, fact.job, fact.target)):
        notices.finish(id_)
        return
    notice = notices.open_or_new(id_, fact, now, "node_drained", fact.target)
    if notice is None or notice.began_at is not None:
        return
    action = _bounded(f"drained by {fact.by}")
    _begin(notices, notice, fact, nodes=(fact.target,), action=action)


def _left(notices: Notices, fact: NodeLeft | NodeLost, now: float) -> None:
    del now
    for notice in _drains(notices, fact.job, fact.node):
        _end_drain(notices, notice, fact, "left" if isinstance(fact, NodeLeft) else "lost")


def _end_drain(notices: Notices, notice: Notice, fact: NodeLeft | NodeLost, outcome: str) -> None:
    if notice.began_at is None or fact.at < notice.began_at:
        return  # an earlier agent of the node
    _end(notices, notice, fact, outcome)


def _drains(notices: Notices, job: str, node: str) -> list[Notice]:
    """The drains of this node that are not over."""
    key = ("node_drained", job, node)
    return [
        notice
        for notice in notices.all()
        if (notice.event, notice.job, notice.subject) == key and not notice.outcome
    ]


def _found(notices: Notices, fact: StragglerFound, now: float) -> None:
    notice = notices.open_or_new(_finding_id(fact.job, fact.id), fact, now, "slow_rank", fact.id)
    if notice is None or notice.began_at is not None:
        return
    is_late = notices.is_finished(_round_id(fact))
    if notice.outcome or is_late:  # heard in the wrong order
        notices.finish(notice.id)
        return
    _begin(
        notices, notice, fact, round=fact.round, cause=fact.cause, ranks=(fact.rank,),
        nodes=(fact.node,), confidence=fact.confidence, cost_ratio=fact.slowdown_ratio,
    )  # fmt: skip


def _cleared(notices: Notices, fact: StragglerCleared, now: float) -> None:
    notice = notices.open_or_new(
        _finding_id(fact.job, fact.finding), fact, now, "slow_rank", fact.finding
    )
    if notice is None or notice.outcome:
        return
    if notice.state == "held":  # it did not last long enough
        notices.finish(notice.id)
        return
    _end(notices, notice, fact, "cleared", lost_s=fact.lost_s)


def _round_ended(notices: Notices, fact: RoundEnded, now: float) -> None:
    """Its ranks are slow no more, whether or not another round follows."""
    del now
    notices.remember(_round_id(fact))
    for notice in notices.all():
        key = (notice.event, notice.job, notice.round)
        if key != ("slow_rank", fact.job, fact.round) or notice.outcome:
            continue
        if notice.state == "held":
            notices.finish(notice.id)
            continue
        _end(notices, notice, fact, "round_ended", "its round ended: ")


def _excluded(notices: Notices, fact: NodeExcluded, now: float) -> None:
    if fact.mode != "enforce" or fact.job != CLUSTER:
        return
    id_ = f"{fact.job}/excluded/{fact.id}"
    notice = notices.open_or_new(id_, fact, now, "node_excluded", fact.node)
    if notice is None or notice.began_at is not None:
        return
    for_s = "" if fact.ttl_s is None else f" for {fact.ttl_s:g} s"
    action = _bounded(f"excluded by {fact.by}{for_s}")
    _begin(notices, notice, fact, nodes=(fact.node,), action=action)


def _included(notices: Notices, fact: NodeIncluded, now: float) -> None:
    _end_all(notices, fact, "node_excluded", fact.node, "included", now)


def _breaker_opened(notices: Notices, fact: BreakerOpened, now: float) -> None:
    if fact.job != CLUSTER:
        return
    id_ = f"{fact.job}/breaker/{fact.id}"
    notice = notices.open_or_new(id_, fact, now, "breaker_open", "")
    if notice is not None and notice.began_at is None:
        _begin(notices, notice, fact)


def _breaker_closed(notices: Notices, fact: BreakerClosed, now: float) -> None:
    _end_all(notices, fact, "breaker_open", "", "closed", now)


def _end_all(
    notices: Notices, fact: NodeIncluded | BreakerClosed, event: Event, subject: str, outcome: str,
    now: float,
) -> None:  # fmt: skip
    """What began before this fact is over. A second copy of the fact ends nothing."""
    del now
    if fact.job != CLUSTER or notices.is_finished(fact.id):
        return
    notices.remember(fact.id)
    for notice in notices.all():
        if (notice.event, notice.subject) == (event, subject) and not notice.outcome:
            _end(notices, notice, fact, outcome)


_READERS: Mapping[type[Fact], Callable[[Notices, Any, float], None]] = {
    ActionDecided: _decided,
    AllocationEnded: _allocation_ended,
    BreakerClosed: _breaker_closed,
    BreakerOpened: _breaker_opened,
    IncidentClosed: _closed,
    IncidentExtended: _extended,
    IncidentOpened: _opened,
    JobEnded: _job_ended,
    NodeExcluded: _excluded,
    NodeIncluded: _included,
    NodeLeft: _left,
    NodeLost: _left,
    OperatorActed: _operated,
    RoundEnded: _round_ended,
    StragglerCleared: _cleared,
    StragglerFound: _found,
    VerdictReached: _judged,
}

READ: tuple[type[Fact], ...] = tuple(_READERS)
"""The kinds of facts that say something to people."""


def _incident_id(fact: IncidentOpened | IncidentExtended | IncidentClosed | VerdictReached) -> str:
    return f"{fact.job}/{fact.incident}"


def _round_id(fact: RoundEnded | StragglerFound) -> str:
    return f"{fact.job}/round/{fact.round}"


def _finding_id(job: str, finding: str) -> str:
    return f"{job}/slow/{finding}"


def _bounded(text: str) -> str:
    """Without secrets: what is cut off later could show the half of one."""
    return redact(text[:_READ_MOST])[:_TEXT_MOST]
