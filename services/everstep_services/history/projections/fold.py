"""Collects the changes of a batch of facts to the projected tables.

Pure. Facts come in stream order, but senders overtake each other: a round may end before it
starts. So a projection does not read the tables: it only returns the values that a fact gives to
columns, and each column's rule merges two values (`everstep.store.projected`).
"""

from collections.abc import Iterable, Mapping

from everstep.messages import (
    FACTS,
    ActionDecided,
    AllocationEnded,
    AllocationStarted,
    Fact,
    IncidentOpened,
    JobChanged,
    JobEnded,
    JobStarted,
    NodeJoined,
)
from everstep.messages.base import RoundFact
from everstep.store.projected.changes import Changes, LoggedFact
from everstep.store.projected.jobs import JOBS, ROUNDS
from everstep.subjects import CLUSTER
from everstep_services.history.projections import (
    checkpoints,
    incidents,
    jobs,
    nodes,
    numerics,
    ranks,
)
from everstep_services.history.projections.common import Projection

_Counts = list[int]
"""The first and last place in the log, the time of the last receipt, and the number of facts."""

PROJECTIONS: Mapping[type[Fact], Projection] = {
    **jobs.PROJECTIONS,
    **ranks.PROJECTIONS,
    **nodes.PROJECTIONS,
    **incidents.PROJECTIONS,
    **checkpoints.PROJECTIONS,
    **numerics.PROJECTIONS,
}
"""Kinds that change a table of their own; every other fact only counts for its job and round."""

_OPENING = frozenset(
    {
        *(kind for kind in FACTS if issubclass(kind, RoundFact)),
        *(JobStarted, JobChanged, JobEnded, AllocationStarted, AllocationEnded),
        *(NodeJoined, IncidentOpened, ActionDecided),
    }
)
"""Kinds that prove that a job exists: all facts of a round, and what rendezvous decides. Requests
of people, and the answers of services, may name jobs that never existed."""


def fold(recorded: Iterable[LoggedFact]) -> Changes:
    """Return the changes by these facts, which come in the order of the log, each once."""
    changes = Changes()
    counts: dict[tuple[str, int | None], _Counts] = {}
    for entry in recorded:
        fact = entry.fact
        if fact.job != CLUSTER:
            _count(counts, (fact.job, fact.round), entry)
            if type(fact) in _OPENING:
                changes.merge(JOBS, (fact.job,), opened_n=entry.n)
        project = PROJECTIONS.get(type(fact))
        if project is not None:
            project(changes, entry, fact)
    for (job, number), (first, last, updated_us, count) in counts.items():
        changes.merge(
            JOBS,
            (job,),
            first_n=first,
            last_n=last,
            updated_us=updated_us,
            facts=count,
            round=number,
        )
        if number is not None:
            changes.merge(ROUNDS, (job, number), first_n=first, last_n=last, facts=count)
    return changes


def _count(
    counts: dict[tuple[str, int | None], _Counts], key: tuple[str, int | None], entry: LoggedFact
) -> None:
    """Count a fact for its job or round; this runs for every fact."""
    row_counts = counts.get(key)
    if row_counts is None:
        counts[key] = [entry.n, entry.n, entry.received_us, 1]
    else:
        row_counts[1] = entry.n
        row_counts[2] = max(row_counts[2], entry.received_us)
        row_counts[3] += 1
