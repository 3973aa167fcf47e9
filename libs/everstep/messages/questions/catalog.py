"""Questions to the catalog about checkpoints, and their replies."""

from everstep.messages.base import Count, Int, Name, Part, Question, Reply, Time
from everstep.messages.facts.checkpoints import RejectedStep
from everstep.messages.orders import Peer


class LocateCheckpoint(Question, frozen=True, kw_only=True, tag="locate_checkpoint.v1"):
    """What can be restored, and from where? Agents ask before a round's ranks load.

    Without an answer, agents search the files and their own memory.
    """

    round: Count
    """The round whose ranks will load the checkpoint."""
    world_size: Count
    """The number of ranks in that round."""
    step: Count | None = None
    """Only this step; None for the newest."""


class ReplicaPlace(Part, frozen=True, kw_only=True):
    """The agents that hold the state of one slot."""

    slot: Count
    """The slot."""
    holders: tuple[Peer, ...]
    """The agents that hold the state in memory, the nearest first."""


class CheckpointPlace(Part, frozen=True, kw_only=True):
    """A checkpoint that can be restored, as far as the catalog knows."""

    step: Count
    """The step."""
    tier: Name
    """The nearest tier in which the checkpoint is complete."""
    path: str = ""
    """The path or URL of the manifest, for the global tier."""
    saved_at: Time | None = None
    """When the checkpoint was committed."""
    size_bytes: Count = 0
    """The size of all shards."""
    world_size: Count | None = None
    """The number of ranks in the round that saved the state."""
    replicas: tuple[ReplicaPlace, ...] = ()
    """For a tier in memory: the holders of each slot's part."""
    survivable_losses: Int | None = None
    """How many nodes may be lost before the checkpoint is."""
    is_verified: bool = False
    """The checkpoint was read again and compared with its hashes."""
    is_pinned: bool = False
    """Retention must not delete the checkpoint."""
    is_quarantined: bool = False
    """The checkpoint must not be restored."""
    is_suspect: bool = False
    """Its values may be wrong: a result since an earlier step was unexpected, and is not judged."""
    is_missing: bool = False
    """The files are gone, and no fact reported that they were removed."""
    verified_at: Time | None = None
    """When the checkpoint was last verified, if ever."""
    round: Count | None = None
    """The round that saved the state."""
    shards: Count = 0
    """The number of files or objects of the checkpoint."""
    has_data_position: bool = False
    """The checkpoint has the position in the data, and the state of the random numbers."""
    note: str = ""
    """Further remarks for people: why the checkpoint is quarantined, who has pinned it."""
    manifest_hash: str = ""
    """The xxh3-128 of the manifest that is there, for the global tier."""
    committed_hash: str = ""
    """The xxh3-128 of the committed manifest; empty when no fact has named it."""


class CheckpointsLocated(Reply, frozen=True, kw_only=True, tag="checkpoints_located.v1"):
    """What can be restored, by the catalog's index; the files themselves decide."""

    places: tuple[CheckpointPlace, ...]
    """The checkpoints, the newest first; empty when the catalog knows of none."""
    rejected: tuple[RejectedStep, ...] = ()
    """Newer checkpoints that cannot be used."""


class ListCheckpoints(Question, frozen=True, kw_only=True, tag="list_checkpoints.v1"):
    """Which checkpoints are there? Anyone asks the catalog; quarantined ones are included.

    The answer is a `CheckpointsLocated`.
    """

    most: Int = 100
    """At most this number of checkpoints, the newest."""
    tier: Name = ""
    """Only checkpoints in this tier; empty for all tiers."""


class ChangeCheckpoint(Question, frozen=True, kw_only=True, tag="change_checkpoint.v1"):
    """Change or verify a checkpoint. An operator asks the catalog."""

    step: Count
    """The step."""
    action: Name
    """`pin`, `unpin`, `verify`, `quarantine`, `release` or `delete`."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    tier: Name = "global"
    """The tier."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class ScanCheckpoints(Question, frozen=True, kw_only=True, tag="scan_checkpoints.v1"):
    """Compare the index with the files that the catalog sees. An operator asks the catalog."""

    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    root: str = ""
    """A folder or URL that the catalog may not know yet; empty for all that it knows."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class CollectCheckpoints(Question, frozen=True, kw_only=True, tag="collect_checkpoints.v1"):
    """Delete what retention does not keep, or list it. An operator asks the catalog.

    The last good checkpoint and those that are pinned or quarantined always stay.
    """

    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    keep_last: Int | None = None
    """How many of the newest checkpoints to keep; None for the catalog's own setting."""
    keep_every_steps: Int | None = None
    """Keep each step that is a multiple of this; None for the catalog's own setting."""
    is_dry_run: bool = True
    """Only list what would be deleted."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class JudgedCheckpoint(Part, frozen=True, kw_only=True):
    """The decision of retention about a checkpoint."""

    step: Count
    """The step."""
    is_kept: bool
    """The checkpoint stays."""
    reason: str
    """The rule that decided."""
    path: str = ""
    """The path or URL of the manifest."""
    size_bytes: Count = 0
    """The size of all shards."""


class CheckpointsCollected(Reply, frozen=True, kw_only=True, tag="checkpoints_collected.v1"):
    """The checkpoints that retention keeps, and those that it does not."""

    judged: tuple[JudgedCheckpoint, ...]
    """The checkpoints, the newest first."""
    text: str
    """What happens now."""
