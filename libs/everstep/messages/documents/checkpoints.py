"""The document of a job in `CHECKPOINTS`: every checkpoint and copy that the catalog knows."""

from everstep.messages.base import Count, DocumentBody, Int, Name, Part, Time


class KnownCheckpoint(Part, frozen=True, kw_only=True):
    """A checkpoint that was committed, and what became of it since."""

    step: Count
    """The step."""
    tier: Name = "global"
    """Where: `global`, or `memory` and `peer` when every slot has its part."""
    path: str = ""
    """Where its manifest is: a path or URL; empty for a tier in memory."""
    round: Count | None = None
    """The round that saved it."""
    saved_at: Time | None = None
    """When it was committed."""
    size_bytes: Count = 0
    """Of all shards."""
    shards: Count = 0
    """How many there are."""
    world_size: Count = 0
    """Ranks in the round that saved it."""
    manifest_hash: str = ""
    """The xxh3-128 of the manifest that is there."""
    committed_hash: str = ""
    """That of the manifest that was committed there last; empty when no fact has named it."""
    has_data_position: bool = False
    """It has the positions of the data and of the random numbers."""
    verified_at: Time | None = None
    """When it was last read back and compared; None until it was."""
    flaw: str = ""
    """What was found to be wrong then; empty when it was good."""
    quarantined_for: str = ""
    """As `cause` in `checkpoint_quarantined`; empty when it may be restored."""
    quarantine_reason: str = ""
    """The evidence."""
    quarantined_by: str = ""
    """Who decided."""
    pinned_by: str = ""
    """Who wants it kept whatever retention says; empty when nobody does."""
    pin_reason: str = ""
    """Why."""
    missing_since: Time | None = None
    """Its files are gone, and no fact reported that they were removed."""

    @property
    def is_good(self) -> bool:
        """It was read back, is what was saved and committed, and may be restored."""
        is_verified = self.verified_at is not None and not self.flaw
        return is_verified and self.is_as_committed and self.may_be_restored

    @property
    def is_as_committed(self) -> bool:
        """Its manifest is the one that was committed, as far as facts have reported."""
        return self.committed_hash in ("", self.manifest_hash)

    @property
    def may_be_restored(self) -> bool:
        """It is neither quarantined nor missing."""
        return not self.quarantined_for and self.missing_since is None


class Holding(Part, frozen=True, kw_only=True, array_like=True):
    """A state, or one part of it, that a node has in memory, as an array in this order.

    An array, because those of 4,096 slots must fit into one document of 1 MiB.
    """

    slot: Count
    """Whose state it is."""
    holder: Name
    """The node that has it; a slot's own node has it whole."""
    step: Count
    """Of this step, or of a later one: not every step is reported."""
    round: Count
    """The round in which it came there."""
    part: Count = 0
    """Which part."""
    parts_needed: Count = 1
    """How many different parts give the state back; 1 for a whole one."""


class CheckpointsDocument(DocumentBody, frozen=True, kw_only=True, tag="checkpoints_document.v1"):
    """All that the catalog knows of a job's checkpoints: any replica can continue from it.

    Key: the job; `everstep.subjects.CLUSTER` says how far the facts of all jobs were read. It is an
    index, made again from the files by a scan.
    """

    checkpoints: tuple[KnownCheckpoint, ...] = ()
    """Those of the global tier, and the newest in memory."""
    holdings: tuple[Holding, ...] = ()
    """Which node has which slot's state in memory."""
    roots: tuple[str, ...] = ()
    """Folders and URLs in which the job has checkpoints."""
    round: Count = 0
    """The newest known round."""
    slots: Int = 0
    """Its slots; 0 when no round runs."""
    world_size: Count = 0
    """Its ranks: what is in memory can be restored by as many only."""
    restored_step: Count | None = None
    """What the newest round began from."""
    degraded_at: Time | None = None
    """Since when fewer node losses than wanted can be survived; None while enough can."""
    survivable_losses: Int | None = None
    """How many could be survived when that was last recorded."""
    stream: str = ""
    """The incarnation of the stream of facts that was read."""
    sequence: Int = 0
    """How far it was read."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
