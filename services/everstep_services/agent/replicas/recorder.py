"""Makes facts of the ranks' reports about their checkpoints.

A report that cannot be read is dropped, with a line in the log. Pure, but for the ids of facts.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from everstep.clock import Clock
from everstep.messages import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointQuarantined,
    CheckpointReleased,
    CheckpointRestored,
    Fact,
    FreshStarted,
    IntervalChosen,
    ReleaseImages,
    ReplicaStored,
    RestoreFailed,
    SaveRefused,
    SavesDelayed,
    SaveStarted,
    ShardsWritten,
    StartRanks,
)
from everstep_services.agent.replicas.store import HeldCopy
from everstep_services.agent.telemetry.facts import AgentFacts
from trainer_sdk.wire import Checkpointed

log = logging.getLogger(__name__)

_TEXT_MOST = 2000
_SELDOM_S = 60.0
_KINDS: Mapping[str, type[Fact]] = {
    "save_started": SaveStarted,
    "committed": CheckpointCommitted,
    "failed": CheckpointFailed,
    "refused": SaveRefused,
    "delayed": SavesDelayed,
    "restored": CheckpointRestored,
    "restore_failed": RestoreFailed,
    "fresh": FreshStarted,
    "interval": IntervalChosen,
    "quarantine": CheckpointQuarantined,
}
_PART_EVENTS = {"part_written": "global", "image": "memory"}


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a checkpoint."""

    step: int
    size_bytes: int
    world_size: int | None = None
    stall_s: float = 0.0
    settle_s: float = 0.0
    hash_s: float = 0.0
    write_s: float = 0.0
    waves: int = 1


class CheckpointRecorder:
    """The checkpoints of one node, one round at a time."""

    def __init__(self, records: AgentFacts, clock: Clock) -> None:
        self._records = records
        self._clock = clock
        self._order: StartRanks | None = None
        self._shards: dict[tuple[str, int], dict[int, Written]] = {}
        """A node's part of a step in one tier, by rank, as far as its ranks have written theirs."""
        self._said_at: float | None = None
        """When a state in memory was last recorded."""
        self._unsaid: dict[int, Written] | None = None
        """The newest state in memory, if it was not recorded."""

    def begins(self, order: StartRanks) -> None:
        """A new round begins."""
        self._order = order
        self._shards.clear()
        self._said_at, self._unsaid = None, None

    def ends(self) -> list[Fact]:
        """The round is over: record its last state in memory."""
        unsaid, self._unsaid = self._unsaid, None
        return [] if unsaid is None else [self._written("memory", unsaid)]

    def heard(self, line: Checkpointed) -> list[Fact]:
        """The facts that follow from a rank's report."""
        if self._order is None or line.round != self._order.round:
            return []
        try:
            if line.event in _PART_EVENTS:
                part = msgspec.convert(line.body, Written)
                return self._part(_PART_EVENTS[line.event], line.rank, part)
            kind = _KINDS.get(line.event)
            if kind is None:
                log.info("unknown_checkpoint_event rank=%d event=%s", line.rank, line.event)
                return []
            return [self._fact(kind, line)]
        except msgspec.ValidationError as error:
            log.warning(
                "checkpoint_event_unreadable rank=%d event=%s error=%s",
                line.rank,
                line.event,
                error,
            )
            return []

    def replica_stored(self, held: HeldCopy, by: str, took_s: float) -> ReplicaStored:
        """All ranks of a slot are held here."""
        copy = held.copy
        return ReplicaStored(
            **self._records.of_round(self.round),
            owner_slot=copy.slot,
            owner=by,
            holder=self._records.node,
            step=copy.step,
            size_bytes=copy.size_bytes * copy.ranks,
            coding="mirror" if copy.parts == 1 else "erasure",
            part=copy.part,
            parts_needed=copy.parts_needed,
            hash=copy.hash if copy.ranks == 1 else "",
            took_s=round(took_s, 3),
        )

    def not_replicated(self, step: int, reason: str, cause: str) -> CheckpointFailed:
        """A state is in the memory of fewer nodes than wanted."""
        return CheckpointFailed(
            **self._records.of_round(self.round), node=self._records.node,
            step=step, tier="peer", stage="replicate", reason=reason, error=cause,
        )  # fmt: skip

    def released(self, order: ReleaseImages, tier: str, path: str) -> CheckpointReleased:
        """A state that was quarantined may be restored again."""
        return CheckpointReleased(
            **self._records.of_round(order.round),
            node=self._records.node,
            step=order.step,
            tier=tier,
            path=path,
            by=order.by,
            reason=order.reason,
        )

    @property
    def round(self) -> int:
        """The node that is recorded."""
        return 0 if self._order is None else self._order.round

    def _fact(self, kind: type[Fact], line: Checkpointed) -> Fact:
        names = set(kind.__struct_fields__)
        body = {name: _short(value) for name, value in line.body.items()}
        if "rank" in names:
            body.setdefault("rank", line.rank)
        own = {name: value for name, value in self._own().items() if name in names}
        return msgspec.convert(body | own, kind)

    def _part(self, tier: str, rank: int, part: Written) -> list[Fact]:
        order, now = self._order, self._clock.now()
        assert order is not None
        shards = self._shards.setdefault((tier, part.step), {})
        shards[rank] = part
        if len(shards) < order.ranks:
            return []
        # an older step was given up by some rank
        self._shards = {
            (of, step): each
            for (of, step), each in self._shards.items()
            if of != tier or step > part.step
        }
        if tier == "global":
            return [self._written(tier, shards)]
        if self._said_at is not None and now - self._said_at < _SELDOM_S:
            self._unsaid = shards
            return []
        self._said_at, self._unsaid = now, None
        return [self._written(tier, shards)]

    def _written(self, tier: str, by_rank: Mapping[int, Written]) -> ShardsWritten:
        parts = list(by_rank.values())
        return ShardsWritten(
            **self._own(),
            step=parts[0].step,
            tier=tier,
            size_bytes=sum(part.size_bytes for part in parts),
            ranks=tuple(sorted(by_rank)),
            world_size=parts[0].world_size,
            stall_s=max(part.stall_s for part in parts),
            settle_s=max(part.settle_s for part in parts),
            hash_s=max(part.hash_s for part in parts),
            write_s=max(part.write_s for part in parts),
            waves=max(part.waves for part in parts),
        )

    def _own(self) -> dict[str, Any]:
        """The fields that a rank need not report."""
        order, records = self._order, self._records
        assert order is not None
        return {**records.of_round(order.round), "node": records.node, "slot": order.slot}


def _short(value: object) -> object:
    return value[:_TEXT_MOST] if isinstance(value, str) else value
