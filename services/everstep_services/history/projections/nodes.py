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
from everstep.store.projected.changes import Changes, LoggedFact, Value, compact
from everstep.store.projected.jobs import ALLOCATIONS, JOBS
from everstep.store.projected.nodes import LIMITS, LOCATED, NODE_CHECKS, WATCHES
from everstep.store.times import to_us
from everstep.subjects import CLUSTER
from everstep_services.history.projections.common import Projection, parts, update_node


def _node_joined(changes: Changes, entry: LoggedFact, fact: NodeJoined) -> None:
    changes.merge(ALLOCATIONS, (fact.job, fact.allocation), first_n=entry.n, nodes_joined=1)
    update_node(
        changes,
        entry,
        fact.node,
        **_state("joined", entry, None),
        joined_n=entry.n,
        job=fact.job,
        allocation=fact.allocation,
        joined_us=to_us(fact.at),
        address=fact.address,
        ranks=fact.ranks,
        failure_domain=fact.failure_domain or None,
        topology=compact(fact.topology),
        device=fact.device or None,
        version=fact.version or None,
        nvlink_domain=fact.nvlink_domain or None,
        joins=1,
    )


def _node_refused(changes: Changes, entry: LoggedFact, fact: NodeRefused) -> None:
    update_node(
        changes,
        entry,
        fact.node,
        refusals=1,
        refused_n=entry.n,
        refused_us=to_us(fact.at),
        refused_cause=fact.cause,
        refused_reason=fact.reason,
    )


def _node_left(changes: Changes, entry: LoggedFact, fact: NodeLeft) -> None:
    update_node(changes, entry, fact.node, **_state("left", entry, fact.reason))


def _node_lost(changes: Changes, entry: LoggedFact, fact: NodeLost) -> None:
    if fact.job != CLUSTER:
        changes.merge(JOBS, (fact.job,), nodes_lost=1)
    update_node(changes, entry, fact.node, **_state("lost", entry, fact.reason), losses=1)


def _node_returned(changes: Changes, entry: LoggedFact, fact: NodeReturned) -> None:
    update_node(changes, entry, fact.node, **_state("joined", entry, fact.reason or None))


def _node_suspected(changes: Changes, entry: LoggedFact, fact: NodeSuspected) -> None:
    update_node(
        changes,
        entry,
        fact.node,
        suspicion_n=entry.n,
        is_suspect=True,
        suspect_us=to_us(fact.at),
        suspect_cause=fact.cause,
        suspect_reason=fact.reason,
        suspect_class=fact.failure_class or None,
        strikes=fact.strikes,
        strikes_limit=fact.strikes_limit,
        suspicions=1,
    )


def _node_cleared(changes: Changes, entry: LoggedFact, fact: NodeCleared) -> None:
    update_node(
        changes,
        entry,
        fact.node,
        suspicion_n=entry.n,
        is_suspect=False,
        suspect_us=to_us(fact.at),
        suspect_cause=None,
        suspect_reason=fact.reason,
        suspect_class=None,
        strikes=None,
        strikes_limit=None,
        spared_n=entry.n,
        spared_us=None,
        spared_reason=None,
    )


def _node_checked(changes: Changes, entry: LoggedFact, fact: NodeCheckFinished) -> None:
    failed = [result for result in fact.results if result.state == "failed"]
    reasons = "; ".join(f"{result.check}: {result.reason}" for result in failed)
    vague = {result.check for result in fact.results if result.state == "unknown"}
    is_clear = fact.occasion == "probe" or not vague.issuperset(fact.checks or ("",))
    is_healthy = fact.is_healthy if is_clear else None
    update_node(
        changes,
        entry,
        fact.node,
        health_n=entry.n,
        is_healthy=is_healthy,
        health_us=to_us(fact.at),
        health_reason=reasons or None,
    )
    changes.merge(
        NODE_CHECKS,
        (entry.n,),
        id=fact.id,
        node=fact.node,
        job=fact.job,
        at_us=to_us(fact.at),
        occasion=fact.occasion,
        is_healthy=is_healthy,
        took_s=fact.took_s,
        checks=compact(fact.checks),
        results=parts(fact.results),
        policy=fact.policy or None,
        failures=fact.failures if fact.policy else None,
        is_acted_on=fact.is_acted_on if fact.policy else None,
    )


def _node_excluded(changes: Changes, entry: LoggedFact, fact: NodeExcluded) -> None:
    if fact.mode == "observe":  # it was only recorded
        update_node(
            changes,
            entry,
            fact.node,
            spared_n=entry.n,
            spared_us=to_us(fact.at),
            spared_reason=fact.reason,
        )
        return
    until_us = None if fact.ttl_s is None else to_us(fact.at) + int(fact.ttl_s * 1e6)
    _exclusion(changes, entry, fact, is_excluded=True, until_us=until_us)


def _node_included(changes: Changes, entry: LoggedFact, fact: NodeIncluded) -> None:
    _exclusion(changes, entry, fact, is_excluded=False, until_us=None)


def _exclusion(
    changes: Changes,
    entry: LoggedFact,
    fact: NodeExcluded | NodeIncluded,
    *,
    is_excluded: bool,
    until_us: int | None,
) -> None:
    update_node(
        changes,
        entry,
        fact.node,
        exclusion_n=entry.n,
        is_excluded=is_excluded,
        excluded_us=to_us(fact.at),
        excluded_until_us=until_us,
        excluded_by=fact.by,
        excluded_reason=fact.reason,
    )


def _state(state: NodePresence, entry: LoggedFact, reason: str | None) -> dict[str, Value]:
    at_us = to_us(entry.fact.at)
    return {"state_n": entry.n, "state": state, "state_us": at_us, "state_reason": reason}


def _watch_changed(changes: Changes, entry: LoggedFact, fact: WatchChanged) -> None:
    changes.merge(
        WATCHES,
        (fact.job, fact.node),
        watch_n=entry.n,
        watch_state=fact.state,
        watch_reason=fact.reason,
        watch_us=to_us(fact.at),
        until_s=fact.until_s,
        sections=compact(fact.sections),
    )


def _limits_learned(changes: Changes, entry: LoggedFact, fact: LimitsLearned) -> None:
    changes.merge(
        LIMITS,
        (fact.job,),
        limits_n=entry.n,
        limits=parts(fact.limits),
        limits_reason=fact.reason,
        limits_us=to_us(fact.at),
        limits_revision=fact.revision,
    )


def _stall_located(changes: Changes, entry: LoggedFact, fact: StallLocated) -> None:
    changes.merge(
        LOCATED,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        round=fact.round,
        at_us=to_us(fact.at),
        first_ranks=compact(fact.first_ranks),
        first_nodes=compact(fact.nodes),
        waiting_ranks=fact.waiting_ranks,
        section=fact.section,
        lead_s=fact.lead_s,
        is_certain=fact.is_certain,
        reason=fact.reason,
    )


PROJECTIONS: Mapping[type[Fact], Projection] = {
    WatchChanged: _watch_changed,
    LimitsLearned: _limits_learned,
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
