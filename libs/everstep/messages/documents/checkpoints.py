"""The document of a job in `CHECKPOINTS`: every checkpoint and copy that the catalog knows."""

from everstep.messages.base import Count, DocumentBody, Int, Name, Part, Time


class KnownCheckpoint(Part, frozen=True, kw_only=True):
    """A committed checkpoint, and what happened to it since."""

    step: Count
    """The step."""
    tier: Name = "global"
    """The tier: `global`, or `memory` and `peer` when every slot has its part."""
    path: str = ""
    """The path or URL of the manifest; empty for a tier in memory."""
    round: Count | None = None
    """The round that saved the state."""
    saved_at: Time | None = None
    """When the checkpoint was committed."""
    size_bytes: Count = 0
    """The size of all shards."""
    shards: Count = 0
    """The number of shards."""
    world_size: Count = 0
    """The number of ranks in the round that saved the state."""
    manifest_hash: str = ""
    """The xxh3-128 of the manifest that is there."""
    committed_hash: str = ""
    """The xxh3-128 of the manifest that was committed there last; empty when no fact has named
    it."""
    has_data_position: bool = False
    """The checkpoint has the position in the data, and the state of the random numbers."""
    verified_at: Time | None = None
    """When the checkpoint was last verified; None before."""
    flaw: str = ""
    """What the verification found to be wrong; empty when the checkpoint was good."""
    quarantined_for: str = ""
    """As `cause` in `checkpoint_quarantined`; empty when the checkpoint may be restored."""
    quarantine_reason: str = ""
    """The evidence."""
    quarantined_by: str = ""
    """Who decided."""
    suspected_for: str = ""
    """Why its values may be wrong: a result was unexpected, and is not judged yet; empty if not."""
    pinned_by: str = ""
    """Who pinned the checkpoint; empty when nobody did."""
    pin_reason: str = ""
    """Why."""
    missing_since: Time | None = None
    """Since when the files are gone, although no fact reported that they were removed."""

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
    """The slot whose state it is."""
    holder: Name
    """The node that has the state; a slot's own node has all of it."""
    step: Count
    """The step of the state; it may be a later one, since not every step is reported."""
    round: Count
    """The round in which the node received the state."""
    part: Count = 0
    """The number of the part."""
    parts_needed: Count = 1
    """How many different parts restore the state; 1 where the node has all of it."""


class UnjudgedResult(Part, frozen=True, kw_only=True):
    """A result that cannot be right, and that nothing has explained yet."""

    case: Name
    """As in `numerics_suspected`."""
    moved_at: Count
    """Checkpoints of this step and of later ones are suspect."""
    reason: str
    """The result in words."""
    signal: Name
    """As in `numerics_suspected`."""
    kind: Name = ""
    """As in `numerics_judged`, once it was judged; empty before."""


class CheckpointsDocument(DocumentBody, frozen=True, kw_only=True, tag="checkpoints_document.v1"):
    """All that the catalog knows of a job's checkpoints: any replica can continue from it.

    Key: the job; the document of `everstep.subjects.CLUSTER` has the position in the facts of
    all jobs. The document is an index, which a scan makes again from the files.
    """

    checkpoints: tuple[KnownCheckpoint, ...] = ()
    """The checkpoints of the global tier, and the newest in memory."""
    holdings: tuple[Holding, ...] = ()
    """Which node has which slot's state in memory."""
    roots: tuple[str, ...] = ()
    """Folders and URLs in which the job has checkpoints."""
    round: Count = 0
    """The newest known round."""
    slots: Int = 0
    """The number of slots of that round; 0 when no round runs."""
    world_size: Count = 0
    """The number of ranks of that round: only a round with as many ranks can restore from
    memory."""
    restored_step: Count | None = None
    """The step from which the newest round began."""
    unjudged: tuple[UnjudgedResult, ...] = ()
    """Results that cannot be right, the oldest first, at most 16."""
    degraded_at: Time | None = None
    """Since when the states in memory survive fewer node losses than wanted; None while they
    survive enough."""
    survivable_losses: Int | None = None
    """How many node losses could be survived when that was last recorded."""
    stream: str = ""
    """The incarnation of the stream of facts."""
    sequence: Int = 0
    """The position in that stream up to which facts were read."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
