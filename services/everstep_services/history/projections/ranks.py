"""Projects ranks and their progress."""

from collections.abc import Mapping

from everstep.messages import (
    ErrorRecord,
    Fact,
    ProgressMade,
    RankExited,
    RankRecovered,
    RanksStopped,
    RankStalled,
    RankStarted,
)
from everstep.store.projected.changes import Changes, LoggedFact, compact
from everstep.store.projected.jobs import EXITS, JOBS, MEMBERS, ROUNDS
from everstep.store.projected.nodes import STALLS
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection, blob_text, update_node

FAILURES = frozenset({"error", "signal", "out_of_memory", "no_device"})
"""How a rank fails. A word from a later release does not count as a failure."""
_TRACEBACK = 8000
"""How much of a traceback's end is in the table; the log has all of it."""


def _rank_started(changes: Changes, _one: LoggedFact, fact: RankStarted) -> None:
    changes.merge(ROUNDS, (fact.job, fact.round), ranks_started=1)


def _rank_exited(changes: Changes, entry: LoggedFact, fact: RankExited) -> None:
    is_failure = fact.how in FAILURES
    failed = int(is_failure)
    changes.merge(JOBS, (fact.job,), ranks_failed=failed, last_step=fact.step)
    changes.merge(
        ROUNDS, (fact.job, fact.round), ranks_exited=1, ranks_failed=failed, last_step=fact.step
    )
    update_node(changes, entry, fact.node, ranks_failed=failed)
    changes.merge(
        EXITS,
        (entry.n,),
        id=fact.id,
        job=fact.job,
        round=fact.round,
        rank=fact.rank,
        local_rank=fact.local_rank,
        node=fact.node,
        slot=fact.slot,
        at_us=to_us(fact.at),
        how=fact.how,
        is_failure=is_failure,
        exit_code=fact.exit_code,
        signal=fact.signal,
        **_error(fact.error),
        first_error=fact.first_error or None,
        log=blob_text(fact.log),
        pid=fact.pid,
        core_dumped=fact.core_dumped,
        lasted_s=fact.lasted_s,
        step=fact.step,
        section=fact.section,
        incident=fact.incident,
    )


def _error(error: ErrorRecord | None) -> dict[str, str | None]:
    if error is None:
        return {}
    traceback = error.traceback
    if len(traceback) > _TRACEBACK:
        # The innermost frames are the last ones, and lines stay whole.
        traceback = "…\n" + traceback[-_TRACEBACK:].partition("\n")[2]
    return {
        "error_name": error.name,
        "error_text": error.text,
        "error_place": error.place or None,
        "error_chain": compact(error.chain) if error.chain else None,
        "traceback": traceback or None,
    }


def _rank_stalled(changes: Changes, entry: LoggedFact, fact: RankStalled) -> None:
    changes.merge(JOBS, (fact.job,), stalls=1, last_step=fact.step)
    changes.merge(ROUNDS, (fact.job, fact.round), stalls=1, last_step=fact.step)
    update_node(changes, entry, fact.node, stalls=1)
    changes.merge(
        STALLS,
        (fact.id,),
        n=entry.n,
        job=fact.job,
        round=fact.round,
        rank=fact.rank,
        node=fact.node,
        at_us=to_us(fact.at),
        phase=fact.phase,
        section=fact.section,
        step=fact.step,
        shown_by=fact.signal,
        blocked_in=fact.blocked_in or None,
        process_state=fact.process_state or None,
        waited_s=fact.waited_s,
        limit_s=fact.limit_s,
        limit_source=fact.limit_source,
        is_fatal=fact.is_fatal,
    )


def _rank_recovered(changes: Changes, _one: LoggedFact, fact: RankRecovered) -> None:
    changes.merge(
        STALLS,
        (fact.stall,),
        job=fact.job,
        round=fact.round,
        rank=fact.rank,
        node=fact.node,
        recovered_us=to_us(fact.at),
        stalled_s=fact.stalled_s,
    )


def _ranks_stopped(changes: Changes, _one: LoggedFact, fact: RanksStopped) -> None:
    stopped, killed = len(fact.ranks), len(fact.killed)
    changes.merge(ROUNDS, (fact.job, fact.round), ranks_stopped=stopped, ranks_killed=killed)
    changes.merge(
        MEMBERS,
        (fact.job, fact.round, fact.slot),
        stopped_fact=fact.id,
        stopped_us=to_us(fact.at),
        stopped_ranks=compact(fact.ranks),
        killed_ranks=compact(fact.killed),
        stop_s=fact.stop_s,
        evidence_s=fact.evidence_s,
        device_wait_s=fact.device_wait_s,
        device_held_bytes=fact.device_held_bytes,
        ranks_killed=killed,
    )


def _progress_made(changes: Changes, entry: LoggedFact, fact: ProgressMade) -> None:
    changes.merge(
        JOBS,
        (fact.job,),
        last_step=fact.step,
        stepped_us=entry.received_us,
        total_steps=fact.total_steps,
        lost_steps=fact.lost_steps,
        is_counted_anew=fact.is_counted_anew,
    )
    changes.merge(
        ROUNDS,
        (fact.job, fact.round),
        first_step=fact.step if fact.is_first else None,
        first_step_us=to_us(fact.at) if fact.is_first else None,
        last_step=fact.step,
        lost_steps=fact.lost_steps,
    )


PROJECTIONS: Mapping[type[Fact], Projection] = {
    RankStarted: _rank_started,
    RankExited: _rank_exited,
    RankStalled: _rank_stalled,
    RankRecovered: _rank_recovered,
    RanksStopped: _ranks_stopped,
    ProgressMade: _progress_made,
}
