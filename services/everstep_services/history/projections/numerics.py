"""Projects results that cannot be right: suspected, judged, acted upon; and determinism."""

from collections.abc import Mapping

from everstep.messages import (
    Fact,
    NumericsActed,
    NumericsCounted,
    NumericsFact,
    NumericsJudged,
    NumericsSuspected,
)
from everstep.store.projected.changes import Changes, LoggedFact, Value
from everstep.store.projected.jobs import JOBS
from everstep.store.projected.numerics import COMPARED_RESULTS, NUMERICS_ACTS, NUMERICS_CASES
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection, copied, fields_of


def _suspected(changes: Changes, entry: LoggedFact, fact: NumericsSuspected) -> None:
    values = fields_of(entry, NUMERICS_CASES, "suspected_fact", suspected_reason=fact.reason)
    _about(changes, entry, fact, **values)


def _judged(changes: Changes, entry: LoggedFact, fact: NumericsJudged) -> None:
    _about(changes, entry, fact, **fields_of(entry, NUMERICS_CASES, "judged_fact"))


def _acted(changes: Changes, entry: LoggedFact, fact: NumericsActed) -> None:
    _about(changes, entry, fact)
    changes.merge(JOBS, (fact.job,), lost_steps=fact.lost_steps)
    copied(NUMERICS_ACTS)(changes, entry, fact)


def _about(changes: Changes, entry: LoggedFact, fact: NumericsFact, **values: Value) -> None:
    changes.merge(
        NUMERICS_CASES, (fact.job, fact.case), first_n=entry.n, last_n=entry.n, round=fact.round,
        step=fact.step, incident=fact.incident, **values,
    )  # fmt: skip


def _counted(changes: Changes, entry: LoggedFact, fact: NumericsCounted) -> None:
    for result in fact.results:
        changes.merge(
            COMPARED_RESULTS, (fact.job, fact.round, result.name), counted_n=entry.n,
            counted_us=to_us(fact.at), steps=fact.steps, again=fact.again,
            compared=result.compared, different=result.different, largest=result.largest,
        )  # fmt: skip


PROJECTIONS: Mapping[type[Fact], Projection] = {
    NumericsSuspected: _suspected,
    NumericsJudged: _judged,
    NumericsActed: _acted,
    NumericsCounted: _counted,
}
