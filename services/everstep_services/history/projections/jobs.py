"""Projects jobs and their allocations."""

from collections.abc import Mapping

from everstep.messages import (
    AllocationEnded,
    AllocationStarted,
    Fact,
    JobChanged,
    JobEnded,
    JobSpec,
    JobStarted,
)
from everstep.store.projected.changes import Changes, LoggedFact, compact
from everstep.store.projected.jobs import ALLOCATIONS, JOBS
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection


def _job_started(changes: Changes, _one: LoggedFact, fact: JobStarted) -> None:
    # 0: a `job_changed` wins, however late the start is recorded.
    _spec(changes, fact.job, 0, fact.spec)
    changes.merge(
        JOBS,
        (fact.job,),
        started_us=to_us(fact.at),
        user=fact.user or None,
        version=fact.version or None,
    )


def _job_changed(changes: Changes, entry: LoggedFact, fact: JobChanged) -> None:
    _spec(changes, fact.job, entry.n, fact.spec)


def _spec(changes: Changes, job: str, n: int, spec: JobSpec) -> None:
    changes.merge(
        JOBS,
        (job,),
        spec_n=n,
        name=spec.name,
        labels=compact(dict(spec.labels)),
        command=compact(spec.command),
        config_fingerprint=spec.config_fingerprint,
        nodes_min=spec.nodes_min,
        nodes_max=spec.nodes_max,
        ranks_per_node=spec.ranks_per_node,
        spares=spec.spares,
        max_restarts=spec.max_restarts,
        max_restarts_per_hour=spec.max_restarts_per_hour,
        no_progress_limit=spec.no_progress_limit,
    )


def _job_ended(changes: Changes, _one: LoggedFact, fact: JobEnded) -> None:
    changes.merge(
        JOBS,
        (fact.job,),
        ended_fact=fact.id,
        ended_us=to_us(fact.at),
        end_state=fact.state,
        end_reason=fact.reason,
        end_incident=fact.incident,
        exit_code=fact.exit_code,
        last_step=fact.last_step,
    )


def _allocation_started(changes: Changes, entry: LoggedFact, fact: AllocationStarted) -> None:
    changes.merge(JOBS, (fact.job,), live_allocations=1, begun_fact=fact.id)
    changes.merge(
        ALLOCATIONS,
        (fact.job, fact.allocation),
        first_n=entry.n,
        started_fact=fact.id,
        started_us=to_us(fact.at),
        scheduler=fact.scheduler,
        scheduler_job=fact.scheduler_job or None,
        attempt=fact.attempt,
        nodes_promised=len(fact.nodes) or None,
        time_limit_s=fact.time_limit_s,
        grace_s=fact.grace_s,
    )


def _allocation_ended(changes: Changes, entry: LoggedFact, fact: AllocationEnded) -> None:
    changes.merge(JOBS, (fact.job,), live_allocations=-1)
    changes.merge(
        ALLOCATIONS,
        (fact.job, fact.allocation),
        first_n=entry.n,
        ended_fact=fact.id,
        ended_us=to_us(fact.at),
        end_state=fact.state,
        end_reason=fact.reason,
        exit_code=fact.exit_code,
        lasted_s=fact.lasted_s,
    )


PROJECTIONS: Mapping[type[Fact], Projection] = {
    JobStarted: _job_started,
    JobChanged: _job_changed,
    JobEnded: _job_ended,
    AllocationStarted: _allocation_started,
    AllocationEnded: _allocation_ended,
}
