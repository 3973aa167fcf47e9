"""Projects rounds."""

from collections.abc import Mapping

from everstep.messages import Fact, RoundEnded, RoundFormed, RoundStarted, RoundWaiting
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
from everstep_services.history.projections.common import Projection


def _round_waiting(changes: Changes, entry: LoggedFact, fact: RoundWaiting) -> None:
    _phase(changes, fact, WAITING)
    changes.merge(
        ROUNDS,
        (fact.job, fact.round),
        waiting_n=entry.n,
        nodes_waiting=fact.joined,
        nodes_needed=fact.needed,
        waiting_reason=fact.reason or None,
    )


def _round_formed(changes: Changes, entry: LoggedFact, fact: RoundFormed) -> None:
    _phase(changes, fact, FORMED)
    changes.merge(JOBS, (fact.job,), rounds=1, restarts=fact.restarts, world_size=fact.world_size)
    changes.merge(ALLOCATIONS, (fact.job, fact.allocation), first_n=entry.n, rounds=1)
    changes.merge(
        ROUNDS,
        (fact.job, fact.round),
        formed_fact=fact.id,
        formed_us=to_us(fact.at),
        formed_cause=fact.cause,
        formed_reason=fact.reason or None,
        allocation=fact.allocation,
        world_size=fact.world_size,
        nodes=len(fact.members),
        spares=len(fact.spares),
        replaced=len(fact.replaced),
        restarts=fact.restarts,
        recovers_incident=fact.incident,
        waited_s=fact.waited_s,
    )
    for member in fact.members:
        changes.merge(
            MEMBERS,
            (fact.job, fact.round, member.slot),
            formed_fact=fact.id,
            node=member.node,
            first_rank=member.first_rank,
            ranks=member.ranks,
        )


def _round_started(changes: Changes, _one: LoggedFact, fact: RoundStarted) -> None:
    _phase(changes, fact, STARTED)
    changes.merge(
        ROUNDS,
        (fact.job, fact.round),
        started_fact=fact.id,
        started_us=to_us(fact.at),
        start_s=fact.start_s,
        master_address=fact.master_address,
        master_port=fact.master_port,
        warm_ranks=fact.warm_ranks,
        slowest_node=fact.slowest_node or None,
    )


def _round_ended(changes: Changes, _one: LoggedFact, fact: RoundEnded) -> None:
    _phase(changes, fact, ENDED)
    changes.merge(JOBS, (fact.job,), last_step=fact.last_step)
    changes.merge(
        ROUNDS,
        (fact.job, fact.round),
        ended_fact=fact.id,
        ended_us=to_us(fact.at),
        end_cause=fact.cause,
        end_reason=fact.reason,
        end_node=fact.node,
        end_rank=fact.rank,
        end_incident=fact.incident,
        end_trigger=fact.trigger,
        first_step=fact.first_step,
        lasted_s=fact.lasted_s,
        last_step=fact.last_step,
    )


def _phase(changes: Changes, fact: Fact, phase: int) -> None:
    assert fact.round is not None
    order = fact.round * PHASES_A_ROUND + phase
    changes.merge(JOBS, (fact.job,), phase_order=order)
    changes.merge(ROUNDS, (fact.job, fact.round), phase_order=phase)


PROJECTIONS: Mapping[type[Fact], Projection] = {
    RoundWaiting: _round_waiting,
    RoundFormed: _round_formed,
    RoundStarted: _round_started,
    RoundEnded: _round_ended,
}
