"""Checkpoints: saved, committed, verified, quarantined, deleted and restored."""

from everstep.messages.base import Count, Fact, Int, Name, Part, RoundFact


class SaveStarted(RoundFact, frozen=True, kw_only=True, tag="save_started.v1"):
    """The state of a step is being saved; slot 0's agent sends this for the global tier."""

    step: Count
    """The step."""
    tier: Name
    """`memory`, `peer` or `global`."""
    occasion: Name = "interval"
    """`interval`, `requested`, `preemption` or `end`."""


class ShardsWritten(RoundFact, frozen=True, kw_only=True, tag="shards_written.v1"):
    """A node's part of a checkpoint is durable in a tier; the node's agent sends this.

    In the memory and peer tiers, which are saved every few steps, only the first and last save
    of a round are sent, and those by which the newest complete step moves by more than a
    minute.
    """

    node: Name
    """The node."""
    slot: Count
    """The slot of that node."""
    step: Count
    """The step."""
    tier: Name
    """The tier."""
    size_bytes: Count
    """The size of the shards of all ranks of the node."""
    ranks: tuple[Int, ...] = ()
    """The ranks whose state was saved."""
    world_size: Count | None = None
    """The number of ranks in the round that saved the state."""
    stall_s: float = 0.0
    """How long the save blocked the training step, on the slowest rank of the node."""
    settle_s: float = 0.0
    """How long an optimizer waited for the rest of the copy, on the slowest rank."""
    hash_s: float = 0.0
    """The time spent hashing."""
    write_s: float = 0.0
    """The time spent writing and syncing."""
    waves: Int = 1
    """In how many parts the state was staged, because memory was short."""


class CheckpointCommitted(RoundFact, frozen=True, kw_only=True, tag="checkpoint_committed.v1"):
    """A checkpoint became visible: its shards are durable and hashed, its manifest published.

    The agent that published the manifest sends it.
    """

    step: Count
    """The step."""
    tier: Name
    """The tier: `global`, or `memory` and `peer` when every slot has its part."""
    path: str
    """The path or URL of the manifest; empty for a tier in memory."""
    size_bytes: Count
    """The size of all shards."""
    shards: Count
    """The number of shards."""
    world_size: Count
    """The number of ranks in the round that saved the state."""
    manifest_hash: str = ""
    """The xxh3-128 of the manifest."""
    lag_s: float = 0.0
    """The time from the call of the save until the checkpoint was visible."""
    stall_s: float = 0.0
    """How long the save blocked the training step, on the slowest rank."""
    write_s: float = 0.0
    """How long the slowest node hashed and wrote."""
    occasion: Name = "interval"
    """`interval`, `requested`, `preemption` or `end`."""
    has_data_position: bool = False
    """The manifest has the position in the data, and the state of the random numbers."""


class CheckpointFailed(RoundFact, frozen=True, kw_only=True, tag="checkpoint_failed.v1"):
    """A save failed; the agent of the rank that failed sends this.

    Earlier checkpoints are untouched.
    """

    node: Name
    """The node."""
    step: Count
    """The step."""
    tier: Name
    """The tier that was being written."""
    stage: Name
    """`plan`, `copy`, `hash`, `write`, `sync`, `manifest`, `publish`, `keep`, `replicate` or
    `wait`."""
    reason: str
    """What happened, which limit was passed, and what to do."""
    rank: Count | None = None
    """The rank that failed, if the failure is that of one rank."""
    path: str = ""
    """The file or object."""
    error: str = ""
    """`ENOSPC`, `writer_died`, `timeout` …"""
    policy: str = "warn"
    """What follows: `warn`, `retry` or `fatal`."""
    attempt: Count = 1
    """The number of the attempt."""
    last_good_step: Count | None = None
    """The step of the newest committed checkpoint, in any tier."""


class SaveRefused(RoundFact, frozen=True, kw_only=True, tag="save_refused.v1"):
    """A save was not begun, because it could not fit or would have to wait for others.

    The node's agent sends this, once per cause.
    """

    node: Name
    """The node."""
    step: Count
    """The step."""
    reason: str
    """What is too small or too slow, and what to do."""
    needed_bytes: Int | None = None
    """The space that the save needs."""
    available_bytes: Int | None = None
    """The space that is free."""
    place: str = ""
    """Where the space is short: `/dev/shm`, the memory cap, the file system of the checkpoints."""


class SavesDelayed(RoundFact, frozen=True, kw_only=True, tag="saves_delayed.v1"):
    """Storage is slower than saving: checkpoints wait, steps do not.

    The node's agent sends this at the beginning, each time that the lag has doubled, and at the
    end.
    """

    node: Name
    """The node."""
    lag_s: float
    """The age of the oldest save that is not durable yet."""
    waiting: Int
    """The number of saves that wait; 0 at the end."""
    reason: str
    """What is slow."""
    waiting_bytes: Int = 0
    """The memory that these saves need."""


class CheckpointVerified(Fact, frozen=True, kw_only=True, tag="checkpoint_verified.v1"):
    """A checkpoint was read again and compared with its hashes.

    The catalog sends this, or the agent that verified the checkpoint.
    """

    step: Count
    """The step."""
    tier: Name
    """The tier."""
    is_good: bool
    """Every shard that was read is as saved, and the manifest is the committed one."""
    path: str = ""
    """The path or URL of the manifest."""
    reason: str = ""
    """What is wrong, with the shard; empty when the checkpoint is good."""
    size_bytes: Count = 0
    """How much was read."""
    took_s: float = 0.0
    """How long the verification took."""
    manifest_hash: str = ""
    """The xxh3-128 of the verified manifest; empty where it is not known."""


class CheckpointQuarantined(Fact, frozen=True, kw_only=True, tag="checkpoint_quarantined.v1"):
    """A checkpoint must not be restored, and is not deleted.

    The catalog sends this, or the agent of a rank that could not use the checkpoint.
    """

    step: Count
    """The step."""
    tier: Name
    """The tier; the same step in another tier may be good."""
    cause: Name
    """`corrupt`, `incomplete`, `nan_after_load`, `numerics` or `operator`."""
    reason: str
    """The evidence."""
    path: str = ""
    """The path or URL of the manifest."""
    node: Name | None = None
    """The node, for a tier in memory."""
    by: Name = "catalog"
    """Who decided: `catalog`, an operator's name, or `rank N`."""


class CheckpointReleased(Fact, frozen=True, kw_only=True, tag="checkpoint_released.v1"):
    """A quarantined checkpoint may be restored again; the catalog sends this.

    For a tier in memory, the node's agent sends it for each state there.
    """

    step: Count
    """The step."""
    tier: Name
    """The tier."""
    by: Name
    """Who decided."""
    reason: str
    """Why."""
    path: str = ""
    """The path of the state, for a tier in memory."""
    node: Name | None = None
    """The node, for a tier in memory."""


class TierRead(Part, frozen=True, kw_only=True):
    """How much a restore read from one tier."""

    tier: Name
    """`memory`, `peer` or `global`."""
    ranks: Count
    """How many ranks read from the tier."""
    size_bytes: Count = 0
    """How much they read."""
    read_s: float = 0.0
    """How long the slowest rank read."""


class RejectedStep(Part, frozen=True, kw_only=True):
    """A newer checkpoint that a restore did not use."""

    step: Count
    """The step."""
    reason: str
    """Why: which shard, which hash, or which node is missing."""
    tier: Name = ""
    """The tier."""
    rank: Count | None = None
    """The rank that could not load the checkpoint."""
    path: str = ""
    """The path or URL of the manifest, for the global tier."""
    is_corrupt: bool = False
    """The files differ from what was saved; otherwise they may be good, but of no use to this
    round."""


class CheckpointRestored(RoundFact, frozen=True, kw_only=True, tag="checkpoint_restored.v1"):
    """All ranks agreed on a step and loaded it, verified; slot 0's agent sends this."""

    step: Count
    """The step."""
    world_size: Count
    """The number of ranks in this round."""
    tiers: tuple[TierRead, ...]
    """The tiers that the ranks read."""
    reason: str
    """Why this step was chosen: it is the newest, or the newer ones failed."""
    took_s: float
    """The time from the first rank's call until the last rank had its state."""
    rejected: tuple[RejectedStep, ...] = ()
    """Newer checkpoints that could not be used."""
    saved_world_size: Int | None = None
    """The number of ranks in the round that saved the state, if it differs."""
    path: str = ""
    """The path or URL of the manifest, for the global tier."""


class RestoreFailed(RoundFact, frozen=True, kw_only=True, tag="restore_failed.v1"):
    """No checkpoint can be used, although there are some, or a step was requested.

    The job stops rather than start from scratch. Slot 0's agent sends this.
    """

    reason: str
    """What is wrong with all checkpoints, and what to do."""
    wanted_step: Int | None = None
    """The step that was requested by its number."""
    rejected: tuple[RejectedStep, ...] = ()
    """Each checkpoint, with the reason."""


class FreshStarted(RoundFact, frozen=True, kw_only=True, tag="fresh_started.v1"):
    """The training starts from scratch, on purpose; slot 0's agent sends this."""

    cause: Name
    """`no_checkpoints` (there has never been one) or `allowed` (by the script, or by
    `everstep run --allow-fresh-start`)."""
    reason: str
    """Where checkpoints were looked for, and who allowed it."""
    rejected: tuple[RejectedStep, ...] = ()
    """The checkpoints that could not be used, when a fresh start was allowed."""


class CheckpointDeleted(Fact, frozen=True, kw_only=True, tag="checkpoint_deleted.v1"):
    """Retention or an operator removed a checkpoint; the service that removed it sends this."""

    step: Count
    """The step."""
    tier: Name
    """The tier."""
    reason: str
    """The rule, or the person who asked."""
    freed_bytes: Count = 0
    """The space that the deletion freed."""
    path: str = ""
    """The path or URL at which the checkpoint was."""
    last_good_step: Count | None = None
    """The step of the newest verified checkpoint that remains."""


class DeletionRefused(Fact, frozen=True, kw_only=True, tag="deletion_refused.v1"):
    """The catalog refused to delete a checkpoint, which must stay."""

    step: Count
    """The step."""
    tier: Name
    """The tier."""
    reason: str
    """Why the checkpoint must stay: it is the last good one, is pinned, or is being read."""
    by: Name = ""
    """Who wanted to delete the checkpoint."""


class CheckpointPinned(Fact, frozen=True, kw_only=True, tag="checkpoint_pinned.v1"):
    """A checkpoint is kept, whatever the rules of retention; the catalog sends this."""

    step: Count
    """The step."""
    by: Name
    """Who asked."""
    reason: str
    """Why."""


class CheckpointUnpinned(Fact, frozen=True, kw_only=True, tag="checkpoint_unpinned.v1"):
    """Retention may delete a checkpoint again; the catalog sends this."""

    step: Count
    """The step."""
    by: Name
    """Who asked."""
    reason: str
    """Why."""


class IntervalChosen(RoundFact, frozen=True, kw_only=True, tag="interval_chosen.v1"):
    """The interval of saves changed; slot 0's agent sends this."""

    tier: Name
    """The tier that the interval is for."""
    every_steps: Int
    """The interval in steps."""
    every_s: float
    """The interval in time, at the present step time."""
    reason: str
    """The formula and its inputs, or that the interval was configured."""
    stall_s: float | None = None
    """How long one save blocks the training."""
    mtbf_s: float | None = None
    """The mean time between failures of the job that the formula used."""
