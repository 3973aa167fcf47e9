"""Projects ranks: their progress, their ends, and those that stalled or were slow."""

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
    StateHealed,
    StepTimeShifted,
    StragglerActed,
    StragglerCleared,
    StragglerFound,
)
from everstep.store.projected.changes import Changes, LoggedFact, Value
from everstep.store.projected.incidents import ACTIONS as DECISIONS
from everstep.store.projected.jobs import EXITS, JOBS, MEMBERS, ROUNDS
from everstep.store.projected.nodes import STALLS
from everstep.store.projected.stragglers import ACTIONS, STEP_SHIFTS, STRAGGLERS
from everstep.store.times import to_us
from everstep_services.history.projections.common import (
    Projection,
    copied,
    fields_of,
    json_text,
    update_node,
)

FAILURES = frozenset({"error", "signal", "out_of_memory", "no_device"})
"""How a rank fails. A word from a later release does not count as a failure."""
_TRACEBACK = 8000
"""How much of a traceback's end is in the table; the log has all of it."""


def _rank_started(changes: Changes, _entry: LoggedFact, fact: RankStarted) -> None:
    changes.merge(ROUNDS, (fact.job, fact.round), ranks_started=1)


def _state_healed(changes: Changes, entry: LoggedFact, fact: StateHealed) -> None:
    if not fact.rank:
        values = fields_of(entry, ROUNDS, "healed_fact", healed=fact.sentence)
        changes.merge(ROUNDS, (fact.job, fact.round), **values)


def _rank_exited(changes: Changes, entry: LoggedFact, fact: RankExited) -> None:
    is_failure = fact.how in FAILURES
    failed = int(is_failure)
    changes.merge(JOBS, (fact.job,), ranks_failed=failed, last_step=fact.step)
    changes.merge(
        ROUNDS, (fact.job, fact.round), ranks_exited=1, ranks_failed=failed, last_step=fact.step
    )
    update_node(changes, entry, fact.node, ranks_failed=failed)
    values = fields_of(entry, EXITS, is_failure=is_failure, **_error(fact.error))
    changes.merge(EXITS, (entry.n,), **values)


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
        "error_chain": json_text(error.chain or None),
        "traceback": traceback or None,
    }


def _rank_stalled(changes: Changes, entry: LoggedFact, fact: RankStalled) -> None:
    changes.merge(JOBS, (fact.job,), stalls=1, last_step=fact.step)
    changes.merge(ROUNDS, (fact.job, fact.round), stalls=1, last_step=fact.step)
    update_node(changes, entry, fact.node, stalls=1)
    changes.merge(STALLS, (fact.id,), **fields_of(entry, STALLS, shown_by=fact.signal))


def _rank_recovered(changes: Changes, _entry: LoggedFact, fact: RankRecovered) -> None:
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


def _ranks_stopped(changes: Changes, entry: LoggedFact, fact: RanksStopped) -> None:
    stopped, killed = len(fact.ranks), len(fact.killed)
    changes.merge(ROUNDS, (fact.job, fact.round), ranks_stopped=stopped, ranks_killed=killed)
    killed_ranks = json_text(fact.killed)
    values = fields_of(entry, MEMBERS, "stopped_fact", killed_ranks=killed_ranks)
    changes.merge(MEMBERS, (fact.job, fact.round, fact.slot), **values, ranks_killed=killed)


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


def _slow_found(changes: Changes, entry: LoggedFact, fact: StragglerFound) -> None:
    values = fields_of(entry, STRAGGLERS, found_us=to_us(fact.at))
    changes.merge(STRAGGLERS, (fact.id,), **values)


def _slow_cleared(changes: Changes, entry: LoggedFact, fact: StragglerCleared) -> None:
    changes.merge(STRAGGLERS, (fact.finding,), **fields_of(entry, STRAGGLERS, "cleared_fact"))


def _acted(changes: Changes, entry: LoggedFact, fact: StragglerActed) -> None:
    values = fields_of(entry, STRAGGLERS, "acted_fact", "action_")
    changes.merge(STRAGGLERS, (fact.finding,), **values)
    mode = "observe" if fact.outcome == "observed" else "enforce"
    decided: dict[str, Value] = {
        "n": entry.n, "job": fact.job, "round": fact.round, "action": fact.action, "mode": mode,
        "rule": f"slow_rank.{fact.action}", "reason": fact.reason, "decided_us": to_us(fact.at),
        "decided_by": fact.source, "rests_on": json_text((fact.finding,)),
        "taken_fact": fact.id, "taken_us": to_us(fact.at), "took_s": 0.0, "outcome": fact.outcome,
        "outcome_reason": fact.reason,
    }  # fmt: skip
    changes.merge(DECISIONS, (fact.id,), **decided)
    if fact.action in ACTIONS:
        values = fields_of(entry, STRAGGLERS, f"{fact.action}_fact")
        changes.merge(STRAGGLERS, (fact.finding,), **values)


PROJECTIONS: Mapping[type[Fact], Projection] = {
    RankStarted: _rank_started,
    StateHealed: _state_healed,
    RankExited: _rank_exited,
    RankStalled: _rank_stalled,
    RankRecovered: _rank_recovered,
    RanksStopped: _ranks_stopped,
    ProgressMade: _progress_made,
    StragglerFound: _slow_found,
    StragglerCleared: _slow_cleared,
    StragglerActed: _acted,
    StepTimeShifted: copied(STEP_SHIFTS),
}
