"""Projects slow ranks (found, cleared, acted upon), and changes of the step time of a job."""

from collections.abc import Mapping

from everstep.messages import (
    Fact,
    StepTimeShifted,
    StragglerActed,
    StragglerCleared,
    StragglerFound,
)
from everstep.store.projected.changes import Changes, LoggedFact, Value
from everstep.store.projected.stragglers import ACTIONS, STEP_SHIFTS, STRAGGLERS
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection, parts


def _found(changes: Changes, entry: LoggedFact, fact: StragglerFound) -> None:
    changes.merge(
        STRAGGLERS,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        round=fact.round,
        rank=fact.rank,
        node=fact.node,
        slot=fact.slot,
        role=fact.role or None,
        found_us=to_us(fact.at),
        cause=fact.cause,
        reason=fact.reason,
        section=fact.section,
        scores=parts(fact.scores),
        lateness_s=fact.lateness_s,
        slowdown_ratio=fact.slowdown_ratio,
        windows=fact.windows,
        confidence=fact.confidence,
        failure_class=fact.failure_class or None,
    )


def _cleared(changes: Changes, _one: LoggedFact, fact: StragglerCleared) -> None:
    changes.merge(
        STRAGGLERS,
        (fact.finding,),
        cleared_fact=fact.id,
        cleared_us=to_us(fact.at),
        cleared_reason=fact.reason,
        lasted_s=fact.lasted_s,
        lost_s=fact.lost_s,
    )


def _acted(changes: Changes, _one: LoggedFact, fact: StragglerActed) -> None:
    changes.merge(
        STRAGGLERS,
        (fact.finding,),
        acted_fact=fact.id,
        acted_us=to_us(fact.at),
        action=fact.action,
        action_outcome=fact.outcome,
        action_reason=fact.reason,
    )
    if fact.action in ACTIONS:
        values: dict[str, Value] = {
            f"{fact.action}_fact": fact.id,
            f"{fact.action}_us": to_us(fact.at),
            f"{fact.action}_outcome": fact.outcome,
            f"{fact.action}_reason": fact.reason,
        }
        changes.merge(STRAGGLERS, (fact.finding,), **values)


def _shifted(changes: Changes, entry: LoggedFact, fact: StepTimeShifted) -> None:
    changes.merge(
        STEP_SHIFTS,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        round=fact.round,
        at_us=to_us(fact.at),
        before_s=fact.before_s,
        now_s=fact.now_s,
        step=fact.step,
        section=fact.section,
        reason=fact.reason,
    )


PROJECTIONS: Mapping[type[Fact], Projection] = {
    StragglerFound: _found,
    StragglerCleared: _cleared,
    StragglerActed: _acted,
    StepTimeShifted: _shifted,
}
