"""Projects nodes and stall detection: standing, checks, the watch, limits, who stopped first."""

from collections.abc import Mapping

from everstep.job_states import NodePresence
from everstep.messages import (
    Fact,
    LimitsLearned,
    NodeCheckFinished,
    NodeCleared,
    NodeExcluded,
    NodeIncluded,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    NodeReturned,
    NodeSuspected,
    StallLocated,
    WatchChanged,
)
from everstep.store.projected.changes import Changes, LoggedFact, Value
from everstep.store.projected.jobs import ALLOCATIONS, JOBS
from everstep.store.projected.nodes import LIMITS, LOCATED, NODE_CHECKS, NODES, WATCHES
from everstep.store.times import to_us
from everstep.subjects import CLUSTER
from everstep_services.history.projections.common import (
    Projection,
    copied,
    fields_of,
    json_text,
    update_node,
)


def _node_joined(changes: Changes, entry: LoggedFact, fact: NodeJoined) -> None:
    changes.merge(ALLOCATIONS, (fact.job, fact.allocation), first_n=entry.n, nodes_joined=1)
    values = fields_of(entry, NODES, "joined_n")
    update_node(changes, entry, fact.node, **_state("joined", entry, None), **values, joins=1)


def _node_refused(changes: Changes, entry: LoggedFact, fact: NodeRefused) -> None:
    update_node(changes, entry, fact.node, **fields_of(entry, NODES, "refused_n"), refusals=1)


def _node_left(changes: Changes, entry: LoggedFact, fact: NodeLeft) -> None:
    update_node(changes, entry, fact.node, **_state("left", entry, fact.reason))


def _node_lost(changes: Changes, entry: LoggedFact, fact: NodeLost) -> None:
    if fact.job != CLUSTER:
        changes.merge(JOBS, (fact.job,), nodes_lost=1)
    update_node(changes, entry, fact.node, **_state("lost", entry, fact.reason), losses=1)


def _node_returned(changes: Changes, entry: LoggedFact, fact: NodeReturned) -> None:
    update_node(changes, entry, fact.node, **_state("joined", entry, fact.reason or None))


def _node_suspected(changes: Changes, entry: LoggedFact, fact: NodeSuspected) -> None:
    kind = fact.failure_class or None
    values = _suspicion(entry, is_suspect=True, suspect_class=kind)
    update_node(changes, entry, fact.node, **values, suspicions=1)


def _node_cleared(changes: Changes, entry: LoggedFact, fact: NodeCleared) -> None:
    values = _suspicion(entry, is_suspect=False, suspect_class=None)
    spared: dict[str, Value] = {"spared_n": entry.n, "spared_us": None, "spared_reason": None}
    update_node(changes, entry, fact.node, **values, **spared)


def _suspicion(entry: LoggedFact, **others: Value) -> dict[str, Value]:
    return fields_of(entry, NODES, "suspicion_n", "suspect_", **others)


def _node_checked(changes: Changes, entry: LoggedFact, fact: NodeCheckFinished) -> None:
    failed = [result for result in fact.results if result.state == "failed"]
    reasons = "; ".join(f"{result.check}: {result.reason}" for result in failed)
    vague = {result.check for result in fact.results if result.state == "unknown"}
    is_clear = fact.occasion == "probe" or not vague.issuperset(fact.checks or ("",))
    is_healthy = fact.is_healthy if is_clear else None
    health = fields_of(
        entry, NODES, "health_n", is_healthy=is_healthy, health_reason=reasons or None
    )
    update_node(changes, entry, fact.node, **health)
    values = fields_of(entry, NODE_CHECKS, is_healthy=is_healthy)
    if not fact.policy:
        values.update(failures=None, is_acted_on=None)
    changes.merge(NODE_CHECKS, (entry.n,), **values)


def _node_excluded(changes: Changes, entry: LoggedFact, fact: NodeExcluded) -> None:
    if fact.mode == "observe":  # it was only recorded
        update_node(changes, entry, fact.node, **fields_of(entry, NODES, "spared_n"))
        return
    until_us = None if fact.ttl_s is None else to_us(fact.at) + int(fact.ttl_s * 1e6)
    _exclusion(changes, entry, fact, is_excluded=True, excluded_until_us=until_us)


def _node_included(changes: Changes, entry: LoggedFact, fact: NodeIncluded) -> None:
    _exclusion(changes, entry, fact, is_excluded=False, excluded_until_us=None)


def _exclusion(
    changes: Changes, entry: LoggedFact, fact: NodeExcluded | NodeIncluded, **others: Value
) -> None:
    values = fields_of(entry, NODES, "exclusion_n", "excluded_", **others)
    update_node(changes, entry, fact.node, **values)


def _state(state: NodePresence, entry: LoggedFact, reason: str | None) -> dict[str, Value]:
    return fields_of(entry, NODES, "state_n", state=state, state_reason=reason)


def _stall_located(changes: Changes, entry: LoggedFact, fact: StallLocated) -> None:
    values = fields_of(entry, LOCATED, first_nodes=json_text(fact.nodes))
    changes.merge(LOCATED, (fact.id,), **values)


PROJECTIONS: Mapping[type[Fact], Projection] = {
    WatchChanged: copied(WATCHES, "watch_n"),
    LimitsLearned: copied(LIMITS, "limits_n"),
    StallLocated: _stall_located,
    NodeJoined: _node_joined,
    NodeRefused: _node_refused,
    NodeLeft: _node_left,
    NodeLost: _node_lost,
    NodeReturned: _node_returned,
    NodeSuspected: _node_suspected,
    NodeCleared: _node_cleared,
    NodeCheckFinished: _node_checked,
    NodeExcluded: _node_excluded,
    NodeIncluded: _node_included,
}
