"""How facts change the index of a job.

The same facts in the same order make the same index in every replica; a fact that comes a second
time changes nothing.
"""

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from everstep.messages import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReleased,
    CheckpointRestored,
    CheckpointUnpinned,
    CheckpointVerified,
    Fact,
    FreshStarted,
    Holding,
    JobEnded,
    KnownCheckpoint,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReturned,
    NumericsActed,
    NumericsJudged,
    NumericsSuspected,
    RejectedStep,
    ReplicaLost,
    ReplicaStored,
    RestoreFailed,
    RoundFormed,
    ShardsWritten,
)
from everstep.messages.base import shared
from everstep.messages.facts.stamp import FactStamp
from everstep.observe.printable import beginning
from everstep_services.catalog.domain.index import Change, Index
from everstep_services.catalog.domain.unjudged import take_result, trust
from trainer_sdk.checkpoint.storage.checkpoints import StoredCheckpoint

READ: tuple[type[Fact], ...] = (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReleased,
    CheckpointRestored,
    CheckpointUnpinned,
    CheckpointVerified,
    FreshStarted,
    JobEnded,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReturned,
    NumericsActed,
    NumericsJudged,
    NumericsSuspected,
    ReplicaLost,
    ReplicaStored,
    RestoreFailed,
    RoundFormed,
    ShardsWritten,
)
"""The facts about checkpoints, and about nodes that hold states."""
_TEXT_MOST = 500


def decide(index: Index, fact: Fact, now: FactStamp) -> None:
    """Have a new fact recorded with the next write, and apply it."""
    index.facts.append(fact)
    apply(index, fact, now)


def quarantined(
    job: str,
    of: KnownCheckpoint | StoredCheckpoint,
    cause: str,
    reason: str,
    by: str,
    now: FactStamp,
) -> CheckpointQuarantined:
    """The fact that a checkpoint must not be restored."""
    return CheckpointQuarantined(
        **now.head(job),
        step=of.step,
        tier=getattr(of, "tier", "global"),
        cause=cause,
        reason=reason,
        path=of.path,
        by=by,
    )


def apply(index: Index, fact: Fact, now: FactStamp) -> None:
    """Change the index by a fact."""
    match fact:
        case CheckpointCommitted():
            _committed(index, fact)
            index.suspect()
        case NumericsSuspected() | NumericsJudged() | NumericsActed():
            take_result(index, fact)
            index.suspect()
        case ReplicaStored() | ReplicaLost() | ShardsWritten():
            _held(index, fact)
        case RoundFormed() | JobEnded():
            _course(index, fact)
        case CheckpointRestored() | RestoreFailed() | FreshStarted():
            if isinstance(fact, CheckpointRestored):
                index.restored_step = fact.step
            _rejected(index, fact.rejected)
        case NodeLost() | NodeLeft() | NodeReturned() | NodeJoined():
            _node(index, fact, now)
        case _:
            _judged(index, fact)


def _committed(index: Index, fact: CheckpointCommitted) -> None:
    before = index.known.get((fact.tier, fact.path, fact.step), KnownCheckpoint(step=fact.step))
    is_same = bool(fact.manifest_hash) and before.manifest_hash == fact.manifest_hash
    kept = (
        before if is_same else KnownCheckpoint(step=fact.step)
    )  # another checkpoint with the same name
    if (
        not kept.is_as_committed
    ):  # the files were seen before the fact, and taken for another checkpoint
        kept = replace(kept, verified_at=None, flaw="")
    index.put(
        replace(
            kept,
            **shared(KnownCheckpoint, fact),
            saved_at=fact.at,
            committed_hash=fact.manifest_hash,
            pinned_by=before.pinned_by,
            pin_reason=before.pin_reason,
            missing_since=None,
        )
    )


def _judged(index: Index, fact: Fact) -> None:
    match fact:
        case CheckpointVerified():
            changed: Change = partial(_verified, fact=fact)
            index.change(fact.step, fact.tier, fact.path, changed)
        case CheckpointQuarantined():
            _quarantined(index, fact)
        case CheckpointReleased():
            released = partial(replace, quarantined_for="", quarantine_reason="", quarantined_by="")
            index.change(fact.step, fact.tier, "", released)
            trust(index, fact.step)
            index.suspect()
        case CheckpointPinned():
            reason = beginning(fact.reason, _TEXT_MOST)
            pinned = partial(replace, pinned_by=fact.by, pin_reason=reason)
            index.change(fact.step, "global", "", pinned)
        case CheckpointUnpinned():
            unpinned = partial(replace, pinned_by="", pin_reason="")
            index.change(fact.step, "global", "", unpinned)
        case CheckpointDeleted():
            for checkpoint in index.of_step(fact.step, fact.tier, fact.path):
                index.drop(checkpoint)
        case _:
            return


def _verified(checkpoint: KnownCheckpoint, fact: CheckpointVerified) -> KnownCheckpoint:
    if fact.manifest_hash not in ("", checkpoint.manifest_hash):
        return checkpoint  # another checkpoint has replaced it
    flaw = (
        ""
        if fact.is_good
        else beginning(fact.reason or "it differs from what was saved", _TEXT_MOST)
    )
    return replace(checkpoint, verified_at=fact.at, flaw=flaw)


def _quarantined(index: Index, fact: CheckpointQuarantined) -> None:
    index.change(
        fact.step,
        fact.tier,
        fact.path,
        lambda one: replace(
            one,
            quarantined_for=fact.cause,
            quarantine_reason=beginning(fact.reason, _TEXT_MOST),
            quarantined_by=fact.by,
        ),
    )


def _held(index: Index, fact: ReplicaStored | ReplicaLost | ShardsWritten) -> None:
    match fact:
        case ReplicaStored():
            slot, step, round_ = fact.owner_slot, fact.step, fact.round
            index.hold(Holding(slot=slot, holder=fact.owner, step=step, round=round_))
            index.hold(
                Holding(
                    slot=slot,
                    holder=fact.holder,
                    step=step,
                    round=round_,
                    part=fact.part,
                    parts_needed=fact.parts_needed,
                )
            )
        case ReplicaLost():
            index.let_go(lambda one: (one.slot, one.holder) == (fact.owner_slot, fact.holder))
        case ShardsWritten(tier="memory"):
            index.hold(Holding(slot=fact.slot, holder=fact.node, step=fact.step, round=fact.round))
        case _:
            return


def _rejected(index: Index, rejected: Sequence[RejectedStep]) -> None:
    """A checkpoint that ranks found corrupt is not good any more; it is read back once more."""
    for step in rejected:
        if step.is_corrupt and step.path:
            flaw = beginning(step.reason or "a restore found it corrupt", _TEXT_MOST)
            index.change(step.step, step.tier, step.path, partial(_doubted, flaw=flaw))


def _doubted(checkpoint: KnownCheckpoint, flaw: str) -> KnownCheckpoint:
    return replace(checkpoint, verified_at=None, flaw=flaw)


def _course(index: Index, fact: RoundFormed | JobEnded) -> None:
    match fact:
        case RoundFormed():
            index.round, index.slots = fact.round, len(fact.members)
            index.restored_step = None
            if fact.world_size != index.world_size:
                index.let_go(lambda _: True)
            index.world_size = fact.world_size
        case JobEnded():  # states in memory go with the agents
            index.slots, index.restored_step = 0, None
            index.let_go(lambda _: True)
            for checkpoint in [
                checkpoint for checkpoint in index.known.values() if checkpoint.tier != "global"
            ]:
                index.drop(checkpoint)


def _node(
    index: Index, fact: NodeLost | NodeLeft | NodeReturned | NodeJoined, now: FactStamp
) -> None:
    """States go with the agent that holds them; an agent that only paused reports them again."""
    match fact:
        case NodeLost():
            why = f"{fact.node} is lost: {fact.reason}"
        case NodeLeft():
            why = f"{fact.node} has left: {fact.reason}"
        case NodeReturned(how="restarted") | NodeJoined(last_round=None):
            why = f"{fact.node} has a new agent"
        case _:
            return
    for holding in index.let_go(lambda holding: holding.holder == fact.node):
        lost = ReplicaLost(
            **now.head(index.job),
            round=holding.round,
            owner_slot=holding.slot,
            holder=holding.holder,
            reason=beginning(why, _TEXT_MOST),
            step=holding.step,
        )
        index.facts.append(lost)
