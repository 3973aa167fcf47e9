"""Projects jobs, their allocations and their rounds."""

from collections.abc import Mapping

from everstep.messages import (
    AllocationEnded,
    AllocationStarted,
    Fact,
    JobChanged,
    JobEnded,
    JobStarted,
    RoundEnded,
    RoundFormed,
    RoundStarted,
    RoundWaiting,
)
from everstep.store.projected.changes import Changes, LoggedFact
from everstep.store.projected.jobs import (
    ALLOCATIONS,
    ENDED,
    FORMED,
    JOBS,
    MEMBERS,
    PHASES_A_ROUND,
    ROUNDS,
    STARTED,
    WAITING,
)
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection, fields_of


def _job_started(changes: Changes, entry: LoggedFact, fact: JobStarted) -> None:
    # 0: a `job_changed` wins, however late the start is recorded.
    spec = fields_of(entry, JOBS, "spec_n", "", fact.spec, spec_n=0)
    by, version, started_us = fact.user or None, fact.version or None, to_us(fact.at)
    changes.merge(JOBS, (fact.job,), **spec, started_us=started_us, user=by, version=version)


def _job_changed(changes: Changes, entry: LoggedFact, fact: JobChanged) -> None:
    changes.merge(JOBS, (fact.job,), **fields_of(entry, JOBS, "spec_n", "", fact.spec))


def _job_ended(changes: Changes, entry: LoggedFact, fact: JobEnded) -> None:
    values = fields_of(entry, JOBS, "ended_fact", "end_")
    changes.merge(JOBS, (fact.job,), **values, last_step=fact.last_step)


def _allocation_started(changes: Changes, entry: LoggedFact, fact: AllocationStarted) -> None:
    changes.merge(JOBS, (fact.job,), live_allocations=1, begun_fact=fact.id)
    promised = len(fact.nodes) or None
    values = fields_of(entry, ALLOCATIONS, "started_fact", nodes_promised=promised)
    changes.merge(ALLOCATIONS, (fact.job, fact.allocation), **values, first_n=entry.n)


def _allocation_ended(changes: Changes, entry: LoggedFact, fact: AllocationEnded) -> None:
    changes.merge(JOBS, (fact.job,), live_allocations=-1)
    values = fields_of(entry, ALLOCATIONS, "ended_fact", "end_")
    changes.merge(ALLOCATIONS, (fact.job, fact.allocation), **values, first_n=entry.n)


def _round_waiting(changes: Changes, entry: LoggedFact, fact: RoundWaiting) -> None:
    _phase(changes, fact, WAITING)
    joined, needed = fact.joined, fact.needed
    values = fields_of(entry, ROUNDS, "waiting_n", nodes_waiting=joined, nodes_needed=needed)
    changes.merge(ROUNDS, (fact.job, fact.round), **values)


def _round_formed(changes: Changes, entry: LoggedFact, fact: RoundFormed) -> None:
    _phase(changes, fact, FORMED)
    size = fields_of(entry, JOBS, "formed_fact")
    changes.merge(JOBS, (fact.job,), rounds=1, restarts=fact.restarts, **size)
    changes.merge(ALLOCATIONS, (fact.job, fact.allocation), first_n=entry.n, rounds=1)
    values = fields_of(
        entry,
        ROUNDS,
        "formed_fact",
        nodes=len(fact.members),
        spares=len(fact.spares),
        replaced=len(fact.replaced),
        recovers_incident=fact.incident,
    )
    changes.merge(ROUNDS, (fact.job, fact.round), **values)
    for member in fact.members:
        values = fields_of(entry, MEMBERS, "formed_fact", "", member)
        changes.merge(MEMBERS, (fact.job, fact.round, member.slot), **values)


def _round_started(changes: Changes, entry: LoggedFact, fact: RoundStarted) -> None:
    _phase(changes, fact, STARTED)
    changes.merge(ROUNDS, (fact.job, fact.round), **fields_of(entry, ROUNDS, "started_fact"))


def _round_ended(changes: Changes, entry: LoggedFact, fact: RoundEnded) -> None:
    _phase(changes, fact, ENDED)
    changes.merge(JOBS, (fact.job,), last_step=fact.last_step)
    values = fields_of(entry, ROUNDS, "ended_fact", "end_")
    steps = {"first_step": fact.first_step, "last_step": fact.last_step}
    changes.merge(ROUNDS, (fact.job, fact.round), **values, **steps)


def _phase(changes: Changes, fact: Fact, phase: int) -> None:
    assert fact.round is not None
    order = fact.round * PHASES_A_ROUND + phase
    changes.merge(JOBS, (fact.job,), phase_order=order)
    changes.merge(ROUNDS, (fact.job, fact.round), phase_order=phase)


PROJECTIONS: Mapping[type[Fact], Projection] = {
    JobStarted: _job_started,
    JobChanged: _job_changed,
    JobEnded: _job_ended,
    AllocationStarted: _allocation_started,
    AllocationEnded: _allocation_ended,
    RoundWaiting: _round_waiting,
    RoundFormed: _round_formed,
    RoundStarted: _round_started,
    RoundEnded: _round_ended,
}
