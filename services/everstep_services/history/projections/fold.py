"""What a batch of facts changes in the projected tables.

Pure. Facts come in stream order, but senders overtake each other: a round may end before it
starts. So nothing here looks at what was there before; it only says what a fact claims, and
each column's rule decides between claims (`everstep.store.projected.jobs`).
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
    actions,
    checkpoints,
    health,
    incidents,
    jobs,
    nodes,
    ranks,
    rounds,
    stragglers,
)
from everstep_services.history.projections.common import Projection

_Heard = list[int]
"""The first and last place in the log, when the last was received, and how many."""

PROJECTIONS: Mapping[type[Fact], Projection] = {
    **jobs.PROJECTIONS,
    **rounds.PROJECTIONS,
    **ranks.PROJECTIONS,
    **nodes.PROJECTIONS,
    **health.PROJECTIONS,
    **incidents.PROJECTIONS,
    **actions.PROJECTIONS,
    **checkpoints.PROJECTIONS,
    **stragglers.PROJECTIONS,
}
"""Kinds that change a table of their own; every other fact only counts for its job and round."""

_OPENING = frozenset(
    {
        *(kind for kind in FACTS if issubclass(kind, RoundFact)),
        *(JobStarted, JobChanged, JobEnded, AllocationStarted, AllocationEnded),
        *(NodeJoined, IncidentOpened, ActionDecided),
    }
)
"""Kinds that say by themselves that there is a job: all facts of a round, and what rendezvous
decides. What people ask and services answer may name jobs that there never were."""


def fold(recorded: Iterable[LoggedFact]) -> Changes:
    """All that these facts change, given in the order of the log, and each once."""
    changes = Changes()
    heard: dict[tuple[str, int | None], _Heard] = {}
    for entry in recorded:
        fact = entry.fact
        if fact.job != CLUSTER:
            _hear(heard, (fact.job, fact.round), entry)
            if type(fact) in _OPENING:
                changes.merge(JOBS, (fact.job,), opened_n=entry.n)
        claim = PROJECTIONS.get(type(fact))
        if claim is not None:
            claim(changes, entry, fact)
    for (job, number), (first, last, updated_us, count) in heard.items():
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


def _hear(
    heard: dict[tuple[str, int | None], _Heard], key: tuple[str, int | None], entry: LoggedFact
) -> None:
    """Count a fact for its job or round. Apart from the claims: every fact pays for it."""
    entry = heard.get(key)
    if entry is None:
        heard[key] = [entry.n, entry.n, entry.received_us, 1]
    else:
        entry[1] = entry.n
        entry[2] = max(entry[2], entry.received_us)
        entry[3] += 1
