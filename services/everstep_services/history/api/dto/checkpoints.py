"""Checkpoints, as REST shows them."""

from datetime import datetime

from pydantic import Field

from everstep_services.history.api.dto.answer import Answer


class Holder(Answer):
    """A node that has a slot's state in memory."""

    node: str
    slot: int
    address: str
    port: int = Field(description="The port of its replica server.")


class Replica(Answer):
    """The nodes that have the state of one slot."""

    slot: int
    holders: list[Holder] = Field(description="The slot's own node first.")


class Checkpoint(Answer):
    """A checkpoint, as far as the catalog knows; the files are the truth."""

    step: int
    tier: str = Field(description="`global`, `peer` or `memory`.")
    path: str | None = Field(description="The path of its manifest; null for a tier in memory.")
    saved_at: datetime | None
    round: int | None = Field(description="The round that saved it.")
    size_bytes: int
    shards: int = Field(description="How many files or objects hold it.")
    world_size: int | None
    survivable_losses: int | None
    """For a tier in memory: how many nodes may be lost while the checkpoint survives."""
    verified_at: datetime | None
    """When the checkpoint was last read again and compared with its hashes."""
    is_verified: bool = Field(description="It was read back, and every byte is what was saved.")
    is_pinned: bool
    is_quarantined: bool
    is_suspect: bool = Field(
        description="Its values may be wrong: an earlier step had an unexpected result that is not "
        "judged yet."
    )
    is_missing: bool = Field(description="The files are gone, without a deletion on record.")
    has_data_position: bool
    manifest_hash: str | None = Field(description="The xxh3-128 of the manifest that is there.")
    committed_hash: str | None
    """The xxh3-128 of the manifest that was committed; null if no fact has named it."""
    note: str | None = Field(description="Further remarks for people.")
    replicas: list[Replica]


class Checkpoints(Answer):
    """The checkpoints of a job, the newest first."""

    job: str
    items: list[Checkpoint]
    is_live: bool = Field(description="True if the catalog has answered just now.")
    note: str | None = Field(description="Why this may not be the present state.")


class Saves(Answer):
    """The state of saves in one tier, from the record."""

    tier: str = Field(description="`global`, `memory` or `peer`.")
    committed_step: int | None = Field(description="The newest checkpoint that was committed.")
    committed_at: datetime | None
    committed_round: int | None
    path: str | None
    manifest_hash: str | None
    """The xxh3-128 of the manifest of that checkpoint."""
    size_bytes: int | None
    occasion: str | None = Field(examples=["interval"])
    """`interval`, `requested`, `preemption` or `end`."""
    lag_s: float | None
    """The time from the call of the save until the checkpoint was visible."""
    stall_s: float | None = Field(description="How long the save blocked the training step.")
    write_s: float | None
    commits: int | None
    """The number of checkpoints that were committed in this tier."""
    is_failing: bool
    """True if the last save has failed: nothing was committed after it."""
    failed_at: datetime | None = Field(description="When a save failed last.")
    failed_step: int | None
    failed_node: str | None
    failed_stage: str | None
    failed_reason: str | None
    failures: int | None
    every_steps: int | None
    """The number of steps between two saves, at present."""
    every_s: float | None
    interval_reason: str | None
    bad_found: int | None = Field(description="The number of checkpoints in quarantine.")
    deleted: int | None


class SaveDelay(Answer):
    """A node whose saves wait for their storage, or did not fit."""

    node: str
    delay_at: datetime | None
    delay_lag_s: float | None = Field(description="The age of the oldest save that is not durable.")
    waiting: int | None
    """The number of saves that wait; 0 when none waits any more."""
    waiting_bytes: int | None
    delay_reason: str | None
    refusal_at: datetime | None = Field(description="When a save was last refused.")
    refusal_step: int | None
    refusal_reason: str | None
    needed_bytes: int | None
    available_bytes: int | None
    place: str | None
    refusals: int | None


class TierSaves(Saves):
    """The state of saves in one tier of a job."""

    job: str


class NodeSaveDelay(SaveDelay):
    """A node of a job whose saves wait for their storage, or did not fit."""

    job: str


class TierReadOut(Answer):
    """What a restore took from one tier."""

    tier: str
    ranks: int
    size_bytes: int
    read_s: float


class Restores(Answer):
    """What the newest round has restored, and how many lost nodes the copies in memory survive."""

    restored_at: datetime | None
    restored_round: int | None
    outcome: str | None = Field(description="`restored`, `fresh` or `failed`.")
    restored_step: int | None
    tiers: list[TierReadOut] | None
    restored_reason: str | None
    restored_s: float | None
    rejected: int | None = Field(description="Newer checkpoints that could not be used.")
    restores: int | None
    failed_restores: int | None
    fresh_starts: int | None
    copies_at: datetime | None = Field(description="When the number of copies last changed.")
    survivable_losses: int | None = Field(description="How many nodes may be lost at once.")
    is_degraded: bool | None = Field(description="True if there are fewer copies than required.")
    copies_reason: str | None


class JobSaves(Answer):
    """The state of saves and restores, from the record.

    It is right even if the catalog cannot be reached.
    """

    job: str
    tiers: list[Saves]
    delays: list[SaveDelay]
    """Nodes whose saves wait or were refused, those that wait first; at most 1000."""
    restore: Restores | None
    """The newest restore; null if nothing was restored yet."""


class RejectedOut(Answer):
    """A checkpoint that cannot be restored."""

    step: int
    tier: str
    reason: str
    path: str


class LocatedCheckpoints(Answer):
    """The checkpoints that a round would restore, the newest first, and those that it could not."""

    job: str
    places: list[Checkpoint]
    rejected: list[RejectedOut]


class JudgedOut(Answer):
    """The decision of retention about a checkpoint."""

    step: int
    is_kept: bool
    reason: str
    path: str
    size_bytes: int


class Collected(Answer):
    """What retention keeps and what it does not."""

    job: str
    judged: list[JudgedOut] = Field(description="The newest first.")
    text: str = Field(examples=["3 of 8 checkpoints go, which frees 12.0 GiB; nothing was deleted"])
    """The next step, in a sentence."""
