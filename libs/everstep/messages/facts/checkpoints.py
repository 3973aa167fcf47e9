"""Checkpoints: saved, committed, verified, quarantined, deleted and restored."""

from everstep.messages.base import Count, Fact, Int, Name, Part, RoundFact


class SaveStarted(RoundFact, frozen=True, kw_only=True, tag="save_started.v1"):
    """The state of a step is being saved; slot 0's agent sends it for the global tier."""

    step: Count
    """The step."""
    tier: Name
    """`memory`, `peer` or `global`."""
    occasion: Name = "interval"
    """`interval`, `requested`, `preemption` or `end`."""


class ShardsWritten(RoundFact, frozen=True, kw_only=True, tag="shards_written.v1"):
    """A node's part of a checkpoint is durable in a tier; its agent sends it.

    For the memory and peer tiers, where a save is every few steps, only those that changed
    the newest complete step by more than a minute, and the first and last of a round.
    """

    node: Name
    """The node."""
    slot: Count
    """Its slot."""
    step: Count
    """The step."""
    tier: Name
    """Where."""
    size_bytes: Count
    """Of all its ranks."""
    ranks: tuple[Int, ...] = ()
    """Whose state it is."""
    world_size: Count | None = None
    """Ranks in the round that saved it."""
    stall_s: float = 0.0
    """What the training step paid, on the slowest rank of the node."""
    settle_s: float = 0.0
    """How long an optimizer waited for the rest of the copy, on the slowest rank."""
    hash_s: float = 0.0
    """Spent hashing."""
    write_s: float = 0.0
    """Spent writing and syncing."""
    waves: Int = 1
    """In how many waves it was staged, for want of memory."""


class CheckpointCommitted(RoundFact, frozen=True, kw_only=True, tag="checkpoint_committed.v1"):
    """A checkpoint became visible: its shards are durable and hashed, its manifest published.

    The agent that published the manifest sends it.
    """

    step: Count
    """The step."""
    tier: Name
    """Where: `global`, or `memory` and `peer` when every slot has its part."""
    path: str
    """Where its manifest is: a path or URL; empty for a tier in memory."""
    size_bytes: Count
    """Of all shards."""
    shards: Count
    """How many there are."""
    world_size: Count
    """Ranks in the round that saved it."""
    manifest_hash: str = ""
    """The xxh3-128 of the manifest."""
    lag_s: float = 0.0
    """From the call that saved it until it was visible."""
    stall_s: float = 0.0
    """What the training step paid, on the slowest rank."""
    write_s: float = 0.0
    """The slowest node's hashing and writing."""
    occasion: Name = "interval"
    """`interval`, `requested`, `preemption` or `end`."""
    has_data_position: bool = False
    """Its manifest says where the data and the random numbers go on."""


class CheckpointFailed(RoundFact, frozen=True, kw_only=True, tag="checkpoint_failed.v1"):
    """A save failed; the agent of the rank that failed sends it.

    The checkpoints before it are untouched.
    """

    node: Name
    """The node."""
    step: Count
    """The step."""
    tier: Name
    """Where it should have gone."""
    stage: Name
    """`plan`, `copy`, `hash`, `write`, `sync`, `manifest`, `publish`, `keep`, `replicate` or
    `wait`."""
    reason: str
    """What happened, past which limit, and what to do."""
    rank: Count | None = None
    """The rank, where it was one."""
    path: str = ""
    """The file or object."""
    error: str = ""
    """`ENOSPC`, `writer_died`, `timeout` …"""
    policy: str = "warn"
    """What follows: `warn`, `retry` or `fatal`."""
    attempt: Count = 1
    """Which attempt it was."""
    last_good_step: Count | None = None
    """The newest committed checkpoint, in any tier."""


class SaveRefused(RoundFact, frozen=True, kw_only=True, tag="save_refused.v1"):
    """A save was not begun, because it could not fit or would queue up.

    The node's agent sends it, once per cause.
    """

    node: Name
    """The node."""
    step: Count
    """The step."""
    reason: str
    """What is too small or too slow, and what to do."""
    needed_bytes: Int | None = None
    """What it needs."""
    available_bytes: Int | None = None
    """What there is."""
    place: str = ""
    """Where: `/dev/shm`, the memory cap, the file system of the checkpoints."""


class SavesDelayed(RoundFact, frozen=True, kw_only=True, tag="saves_delayed.v1"):
    """Storage is slower than saving: checkpoints wait, steps do not.

    The node's agent sends it when it begins, each time that the lag has doubled, and when it is
    over.
    """

    node: Name
    """The node."""
    lag_s: float
    """Age of the oldest save that is not durable yet."""
    waiting: Int
    """Saves that wait; 0 when it is over."""
    reason: str
    """What is slow."""
    waiting_bytes: Int = 0
    """What they hold in memory."""


class CheckpointVerified(Fact, frozen=True, kw_only=True, tag="checkpoint_verified.v1"):
    """A checkpoint was read again and compared with its hashes.

    The catalog sends it, or the agent that looked.
    """

    step: Count
    """The step."""
    tier: Name
    """Where."""
    is_good: bool
    """Every shard that was read is what was saved, and the manifest the one that was committed."""
    path: str = ""
    """Where its manifest is."""
    reason: str = ""
    """What is wrong, with the shard; empty when it is good."""
    size_bytes: Count = 0
    """How much was read."""
    took_s: float = 0.0
    """How long it took."""
    manifest_hash: str = ""
    """The xxh3-128 of the verified manifest, and of no other one; empty where it is not known."""


class CheckpointQuarantined(Fact, frozen=True, kw_only=True, tag="checkpoint_quarantined.v1"):
    """A checkpoint must not be restored, and is not deleted.

    The catalog sends it, or the agent of a rank that has found it so.
    """

    step: Count
    """The step."""
    tier: Name
    """Where; the same step in another tier may be good."""
    cause: Name
    """`corrupt`, `incomplete`, `nan_after_load` or `operator`."""
    reason: str
    """The evidence."""
    path: str = ""
    """Where its manifest is."""
    node: Name | None = None
    """The node, for a tier in memory."""
    by: Name = "catalog"
    """Who decided: `catalog`, an operator's name, or `rank N`."""


class CheckpointReleased(Fact, frozen=True, kw_only=True, tag="checkpoint_released.v1"):
    """A quarantined checkpoint may be restored again; the catalog sends it.

    For a tier in memory the node's agent does, for each state there.
    """

    step: Count
    """The step."""
    tier: Name
    """Where."""
    by: Name
    """Who decided."""
    reason: str
    """Why."""
    path: str = ""
    """Where the state is, for a tier in memory."""
    node: Name | None = None
    """The node, for a tier in memory."""


class TierRead(Part, frozen=True, kw_only=True):
    """What a restore took from one tier."""

    tier: Name
    """`memory`, `peer` or `global`."""
    ranks: Count
    """How many ranks read from it."""
    size_bytes: Count = 0
    """How much."""
    read_s: float = 0.0
    """The slowest rank's time."""


class RejectedStep(Part, frozen=True, kw_only=True):
    """A newer checkpoint that a restore passed over."""

    step: Count
    """The step."""
    reason: str
    """Why: which shard, which hash, which node is gone."""
    tier: Name = ""
    """Where."""
    rank: Count | None = None
    """The rank that could not have it."""
    path: str = ""
    """Where its manifest is, for the global tier."""
    is_corrupt: bool = False
    """Its files are not what was saved; otherwise they may be good, and of no use to this round."""


class CheckpointRestored(RoundFact, frozen=True, kw_only=True, tag="checkpoint_restored.v1"):
    """All ranks agreed on a step and loaded it, verified; slot 0's agent sends it."""

    step: Count
    """The step."""
    world_size: Count
    """Ranks in this round."""
    tiers: tuple[TierRead, ...]
    """Where they read it from."""
    reason: str
    """Why this step: it is the newest, or which newer ones failed."""
    took_s: float
    """From the first rank's call until the last had its state."""
    rejected: tuple[RejectedStep, ...] = ()
    """Newer ones that could not be used."""
    saved_world_size: Int | None = None
    """Ranks in the round that saved it, when it was another number."""
    path: str = ""
    """Where its manifest is, for the global tier."""


class RestoreFailed(RoundFact, frozen=True, kw_only=True, tag="restore_failed.v1"):
    """No checkpoint can be used, though there are some or one was asked for.

    The job stops rather than start from scratch. Slot 0's agent sends it.
    """

    reason: str
    """What is wrong with all of them, and what to do."""
    wanted_step: Int | None = None
    """The step that was asked for by number."""
    rejected: tuple[RejectedStep, ...] = ()
    """Each, with its reason."""


class FreshStarted(RoundFact, frozen=True, kw_only=True, tag="fresh_started.v1"):
    """The training starts from scratch, on purpose; slot 0's agent sends it."""

    cause: Name
    """`no_checkpoints` (there has never been one) or `allowed` (by the script, or by
    `everstep run --allow-fresh-start`)."""
    reason: str
    """Where checkpoints were looked for, and who allowed it."""
    rejected: tuple[RejectedStep, ...] = ()
    """Those that could not be used, when it was allowed."""


class CheckpointDeleted(Fact, frozen=True, kw_only=True, tag="checkpoint_deleted.v1"):
    """Retention or an operator removed a checkpoint; the service that removed it sends this."""

    step: Count
    """The step."""
    tier: Name
    """Where."""
    reason: str
    """The rule, or who asked."""
    freed_bytes: Count = 0
    """What that freed."""
    path: str = ""
    """Where it was."""
    last_good_step: Count | None = None
    """The newest verified checkpoint that remains."""


class DeletionRefused(Fact, frozen=True, kw_only=True, tag="deletion_refused.v1"):
    """The catalog refused to delete a checkpoint that must stay; it sends this."""

    step: Count
    """The step."""
    tier: Name
    """Where."""
    reason: str
    """It is the last good one, is pinned, or is being read."""
    by: Name = ""
    """Who wanted it."""


class CheckpointPinned(Fact, frozen=True, kw_only=True, tag="checkpoint_pinned.v1"):
    """A checkpoint is kept whatever retention says; the catalog sends it."""

    step: Count
    """The step."""
    by: Name
    """Who asked."""
    reason: str
    """Why."""


class CheckpointUnpinned(Fact, frozen=True, kw_only=True, tag="checkpoint_unpinned.v1"):
    """Retention may have a checkpoint again; the catalog sends it."""

    step: Count
    """The step."""
    by: Name
    """Who asked."""
    reason: str
    """Why."""


class IntervalChosen(RoundFact, frozen=True, kw_only=True, tag="interval_chosen.v1"):
    """How often to save changed; slot 0's agent sends it."""

    tier: Name
    """For which tier."""
    every_steps: Int
    """How often, in steps."""
    every_s: float
    """The same in time, at the present step time."""
    reason: str
    """The formula and its inputs, or that it was configured."""
    stall_s: float | None = None
    """What one save costs the training."""
    mtbf_s: float | None = None
    """The mean time between the job's failures that was used."""
