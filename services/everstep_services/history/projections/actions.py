"""What facts about decisions claim, and what came of them."""

from collections.abc import Mapping

from everstep.messages import ActionDecided, ActionTaken, Fact
from everstep.store.projected.changes import Changes, LoggedFact, compact
from everstep.store.projected.incidents import ACTIONS
from everstep.store.projected.jobs import JOBS
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection, parts


def _decided(changes: Changes, entry: LoggedFact, fact: ActionDecided) -> None:
    budgets = parts(fact.budgets)
    if fact.budgets:
        changes.merge(JOBS, (fact.job,), budgets_n=entry.n, budgets=budgets)
    changes.merge(
        ACTIONS,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        incident=fact.incident,
        action=fact.action,
        round=fact.round,
        decided_us=to_us(fact.at),
        decided_by=fact.source,
        rule=fact.rule,
        mode=fact.mode,
        reason=fact.reason,
        budgets=budgets,
        considered=parts(fact.considered),
        unknowns=compact(fact.missing),
        rests_on=compact(fact.evidence),
        nodes_out=compact(fact.nodes_out),
        nodes_in=compact(fact.nodes_in),
        delay_s=fact.delay_s,
        decide_s=fact.took_s,
    )


def _taken(changes: Changes, entry: LoggedFact, fact: ActionTaken) -> None:
    changes.merge(
        ACTIONS,
        (fact.decision,),
        n=entry.n,
        job=fact.job,
        incident=fact.incident,
        action=fact.action,
        taken_fact=fact.id,
        taken_us=to_us(fact.at),
        outcome=fact.outcome,
        outcome_reason=fact.reason,
        took_s=fact.took_s,
    )


PROJECTIONS: Mapping[type[Fact], Projection] = {ActionDecided: _decided, ActionTaken: _taken}
