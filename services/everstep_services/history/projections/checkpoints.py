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
from everstep_services.history.projections.common import Projection, copied, fields_of


def _committed(changes: Changes, entry: LoggedFact, fact: CheckpointCommitted) -> None:
    values = fields_of(entry, SAVES, "committed_n", path=fact.path or None)
    changes.merge(SAVES, (fact.job, fact.tier), **values, commits=1)


def _quarantined(changes: Changes, _entry: LoggedFact, fact: CheckpointQuarantined) -> None:
    changes.merge(SAVES, (fact.job, fact.tier), bad_found=1)


def _deleted(changes: Changes, _entry: LoggedFact, fact: CheckpointDeleted) -> None:
    changes.merge(SAVES, (fact.job, fact.tier), deleted=1)


def _restored(changes: Changes, entry: LoggedFact, fact: CheckpointRestored) -> None:
    _began(changes, entry, fact, outcome="restored", restored_s=fact.took_s)
    changes.merge(RESTORES, (fact.job,), restores=1)


def _without_state(changes: Changes, entry: LoggedFact, fact: FreshStarted | RestoreFailed) -> None:
    is_fresh = isinstance(fact, FreshStarted)
    _began(changes, entry, fact, outcome="fresh" if is_fresh else "failed")
    counts = {"fresh_starts": int(is_fresh), "failed_restores": int(not is_fresh)}
    changes.merge(RESTORES, (fact.job,), **counts)


def _began(
    changes: Changes,
    entry: LoggedFact,
    fact: CheckpointRestored | FreshStarted | RestoreFailed,
    **others: Value,
) -> None:
    rejected = len(fact.rejected)
    values = fields_of(entry, RESTORES, "restored_n", rejected=rejected, **others)
    changes.merge(RESTORES, (fact.job,), **values)


def _copies(
    changes: Changes, entry: LoggedFact, fact: ReplicationDegraded | ReplicationRestored
) -> None:
    is_degraded = isinstance(fact, ReplicationDegraded)
    reason = fact.reason if isinstance(fact, ReplicationDegraded) else None
    values = fields_of(entry, RESTORES, "copies_n", is_degraded=is_degraded, copies_reason=reason)
    changes.merge(RESTORES, (fact.job,), **values)


PROJECTIONS: Mapping[type[Fact], Projection] = {
    CheckpointCommitted: _committed,
    CheckpointFailed: copied(SAVES, "failed_n", failures=1),
    IntervalChosen: copied(SAVES, "interval_n"),
    CheckpointQuarantined: _quarantined,
    CheckpointDeleted: _deleted,
    SavesDelayed: copied(DELAYS, "delay_n"),
    SaveRefused: copied(DELAYS, "refusal_n", refusals=1),
    CheckpointRestored: _restored,
    FreshStarted: _without_state,
    RestoreFailed: _without_state,
    ReplicationDegraded: _copies,
    ReplicationRestored: _copies,
}
