"""Questions to the catalog about checkpoints, and their replies."""

from everstep.messages.base import Count, Int, Name, Part, Question, Reply, Time
from everstep.messages.facts.checkpoints import RejectedStep
from everstep.messages.orders import Peer


class LocateCheckpoint(Question, frozen=True, kw_only=True, tag="locate_checkpoint.v1"):
    """What can be restored, and from where? Agents ask before a round's ranks load.

    Without an answer they look at the files and their own memory.
    """

    round: Count
    """The round that will load it."""
    world_size: Count
    """Its ranks."""
    step: Count | None = None
    """This step only; None for the newest."""


class ReplicaPlace(Part, frozen=True, kw_only=True):
    """Where the state of one slot can be had from."""

    slot: Count
    """Whose state."""
    holders: tuple[Peer, ...]
    """Who has it in memory, the nearest first."""


class CheckpointPlace(Part, frozen=True, kw_only=True):
    """A checkpoint that can be restored, as far as the catalog knows."""

    step: Count
    """The step."""
    tier: Name
    """The nearest tier in which it is complete."""
    path: str = ""
    """Where its manifest is, for the global tier."""
    saved_at: Time | None = None
    """When it was committed."""
    size_bytes: Count = 0
    """Of all shards."""
    world_size: Count | None = None
    """Ranks in the round that saved it."""
    replicas: tuple[ReplicaPlace, ...] = ()
    """For a tier in memory: where each slot's part is."""
    survivable_losses: Int | None = None
    """How many nodes may be lost before it is."""
    is_verified: bool = False
    """It was read back and compared."""
    is_pinned: bool = False
    """Retention may not have it."""
    is_quarantined: bool = False
    """It must not be restored."""
    is_missing: bool = False
    """Its files are gone, and no fact reported that they were removed."""
    verified_at: Time | None = None
    """When it was last read back, if ever."""
    round: Count | None = None
    """The round that saved it."""
    shards: Count = 0
    """How many files or objects hold it."""
    has_data_position: bool = False
    """It says where the data and the random numbers go on."""
    note: str = ""
    """What else people should know: why it is quarantined, who has pinned it."""
    manifest_hash: str = ""
    """The xxh3-128 of the manifest that is there, for the global tier."""
    committed_hash: str = ""
    """That of the manifest that was committed; empty when no fact has named it."""


class CheckpointsLocated(Reply, frozen=True, kw_only=True, tag="checkpoints_located.v1"):
    """What can be restored; the files are the truth, this is the index."""

    places: tuple[CheckpointPlace, ...]
    """The newest first; empty when the catalog knows of none."""
    rejected: tuple[RejectedStep, ...] = ()
    """Newer ones that cannot be used."""


class ListCheckpoints(Question, frozen=True, kw_only=True, tag="list_checkpoints.v1"):
    """Which checkpoints are there? Anyone asks the catalog; quarantined ones are included.

    The answer is a `CheckpointsLocated`.
    """

    most: Int = 100
    """At most this number of the newest."""
    tier: Name = ""
    """Only those in this tier; empty for all."""


class ChangeCheckpoint(Question, frozen=True, kw_only=True, tag="change_checkpoint.v1"):
    """Do something with a checkpoint. An operator asks the catalog."""

    step: Count
    """The step."""
    action: Name
    """`pin`, `unpin`, `verify`, `quarantine`, `release` or `delete`."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    tier: Name = "global"
    """Where."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class ScanCheckpoints(Question, frozen=True, kw_only=True, tag="scan_checkpoints.v1"):
    """Compare the index with the files, wherever the catalog sees them. An operator asks it."""

    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    root: str = ""
    """A folder or URL that may not be known yet; empty for all that are."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class CollectCheckpoints(Question, frozen=True, kw_only=True, tag="collect_checkpoints.v1"):
    """Delete what retention does not keep, or say what that would be. An operator asks the catalog.

    The last good checkpoint and those that are pinned or quarantined stay, whatever is asked.
    """

    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    keep_last: Int | None = None
    """How many of the newest to keep; None for the catalog's own setting."""
    keep_every_steps: Int | None = None
    """Keep each step that is a multiple of this; None for the catalog's own setting."""
    is_dry_run: bool = True
    """Only list what would be deleted."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class JudgedCheckpoint(Part, frozen=True, kw_only=True):
    """What retention says of a checkpoint."""

    step: Count
    """The step."""
    is_kept: bool
    """It stays."""
    reason: str
    """The rule."""
    path: str = ""
    """Where it is."""
    size_bytes: Count = 0
    """Of all shards."""


class CheckpointsCollected(Reply, frozen=True, kw_only=True, tag="checkpoints_collected.v1"):
    """What retention keeps and what it does not."""

    judged: tuple[JudgedCheckpoint, ...]
    """The newest first."""
    text: str
    """What happens now."""
