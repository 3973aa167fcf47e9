"""Projects stall detection: its state, its limits, and which rank stopped first."""

from collections.abc import Mapping

from everstep.messages import Fact, LimitsLearned, StallLocated, WatchChanged
from everstep.store.projected.changes import Changes, LoggedFact, compact
from everstep.store.projected.nodes import LIMITS, LOCATED, WATCHES
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection, parts


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
}
