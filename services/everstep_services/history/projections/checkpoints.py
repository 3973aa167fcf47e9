"""Projects checkpoints: how saving goes, and what the newest round was restored from."""

from collections.abc import Mapping

from everstep.messages import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointFailed,
    CheckpointQuarantined,
    CheckpointRestored,
    Fact,
    FreshStarted,
    IntervalChosen,
    ReplicationDegraded,
    ReplicationRestored,
    RestoreFailed,
    SaveRefused,
    SavesDelayed,
)
from everstep.store.projected.changes import Changes, LoggedFact, Value
from everstep.store.projected.saves import DELAYS, RESTORES, SAVES
from everstep.store.times import to_us
from everstep_services.history.projections.common import Projection, parts


def _committed(changes: Changes, entry: LoggedFact, fact: CheckpointCommitted) -> None:
    changes.merge(
        SAVES,
        (fact.job, fact.tier),
        committed_n=entry.n,
        committed_step=fact.step,
        committed_us=to_us(fact.at),
        committed_round=fact.round,
        path=fact.path or None,
        manifest_hash=fact.manifest_hash or None,
        size_bytes=fact.size_bytes,
        occasion=fact.occasion,
        lag_s=fact.lag_s,
        stall_s=fact.stall_s,
        write_s=fact.write_s,
        commits=1,
    )


def _failed(changes: Changes, entry: LoggedFact, fact: CheckpointFailed) -> None:
    changes.merge(
        SAVES,
        (fact.job, fact.tier),
        failed_n=entry.n,
        failed_us=to_us(fact.at),
        failed_step=fact.step,
        failed_node=fact.node,
        failed_stage=fact.stage,
        failed_reason=fact.reason,
        failures=1,
    )


def _interval(changes: Changes, entry: LoggedFact, fact: IntervalChosen) -> None:
    changes.merge(
        SAVES,
        (fact.job, fact.tier),
        interval_n=entry.n,
        every_steps=fact.every_steps,
        every_s=fact.every_s,
        interval_reason=fact.reason,
    )


def _quarantined(changes: Changes, _one: LoggedFact, fact: CheckpointQuarantined) -> None:
    changes.merge(SAVES, (fact.job, fact.tier), bad_found=1)


def _deleted(changes: Changes, _one: LoggedFact, fact: CheckpointDeleted) -> None:
    changes.merge(SAVES, (fact.job, fact.tier), deleted=1)


def _delayed(changes: Changes, entry: LoggedFact, fact: SavesDelayed) -> None:
    changes.merge(
        DELAYS,
        (fact.job, fact.node),
        delay_n=entry.n,
        delay_us=to_us(fact.at),
        delay_lag_s=fact.lag_s,
        waiting=fact.waiting,
        waiting_bytes=fact.waiting_bytes,
        delay_reason=fact.reason,
    )


def _refused(changes: Changes, entry: LoggedFact, fact: SaveRefused) -> None:
    changes.merge(
        DELAYS,
        (fact.job, fact.node),
        refusal_n=entry.n,
        refusal_us=to_us(fact.at),
        refusal_step=fact.step,
        refusal_reason=fact.reason,
        needed_bytes=fact.needed_bytes,
        available_bytes=fact.available_bytes,
        place=fact.place or None,
        refusals=1,
    )


def _restored(changes: Changes, entry: LoggedFact, fact: CheckpointRestored) -> None:
    _began(
        changes,
        entry,
        fact,
        outcome="restored",
        restored_step=fact.step,
        tiers=parts(fact.tiers),
        restored_s=fact.took_s,
        restores=1,
    )


def _without_state(changes: Changes, entry: LoggedFact, fact: FreshStarted | RestoreFailed) -> None:
    is_fresh = isinstance(fact, FreshStarted)
    _began(
        changes,
        entry,
        fact,
        outcome="fresh" if is_fresh else "failed",
        restored_step=None,
        tiers=None,
        restored_s=None,
        fresh_starts=int(is_fresh),
        failed_restores=int(not is_fresh),
    )


def _began(
    changes: Changes,
    entry: LoggedFact,
    fact: CheckpointRestored | FreshStarted | RestoreFailed,
    **values: Value,
) -> None:
    changes.merge(
        RESTORES,
        (fact.job,),
        restored_n=entry.n,
        restored_us=to_us(fact.at),
        restored_round=fact.round,
        restored_reason=fact.reason,
        rejected=len(fact.rejected),
        **values,
    )


def _copies(
    changes: Changes, entry: LoggedFact, fact: ReplicationDegraded | ReplicationRestored
) -> None:
    is_degraded = isinstance(fact, ReplicationDegraded)
    changes.merge(
        RESTORES,
        (fact.job,),
        copies_n=entry.n,
        copies_us=to_us(fact.at),
        survivable_losses=fact.survivable_losses,
        is_degraded=is_degraded,
        copies_reason=fact.reason if isinstance(fact, ReplicationDegraded) else None,
    )


PROJECTIONS: Mapping[type[Fact], Projection] = {
    CheckpointCommitted: _committed,
    CheckpointFailed: _failed,
    IntervalChosen: _interval,
    CheckpointQuarantined: _quarantined,
    CheckpointDeleted: _deleted,
    SavesDelayed: _delayed,
    SaveRefused: _refused,
    CheckpointRestored: _restored,
    FreshStarted: _without_state,
    RestoreFailed: _without_state,
    ReplicationDegraded: _copies,
    ReplicationRestored: _copies,
}
