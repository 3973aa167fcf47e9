"""What agents are told to do: small, each with its round, never the whole table."""

from everstep.messages.base import Int, Order, Part


class Peer(Part, frozen=True, kw_only=True):
    """Another agent, as one that streams checkpoint bytes must know it."""

    node: str
    """The node."""
    slot: Int
    """Its slot."""
    address: str
    """Where it listens."""
    port: Int
    """The port of its replica server."""


class StandBy(Order, frozen=True, kw_only=True, tag="stand_by.v1"):
    """You have no slot in this round: stay joined, checked and warm."""


class StartRanks(Order, frozen=True, kw_only=True, tag="start_ranks.v1"):
    """You hold a slot: start its ranks. Rendezvous sends one to each member when a round forms.

    What torchrun's environment variables need, and no more.
    """

    slot: Int
    """The node's slot: GROUP_RANK."""
    slots: Int
    """Slots in all: GROUP_WORLD_SIZE."""
    first_rank: Int
    """The global rank of its first process."""
    ranks: Int
    """How many to start: LOCAL_WORLD_SIZE."""
    world_size: Int
    """WORLD_SIZE."""
    master_address: str
    """MASTER_ADDR."""
    master_port: Int
    """MASTER_PORT, never used by an earlier round."""
    restarts: Int = 0
    """TORCHELASTIC_RESTART_COUNT."""
    max_restarts: Int | None = None
    """TORCHELASTIC_MAX_RESTARTS; None for no limit."""
    incident: str | None = None
    """The incident that it recovers from, if any."""
    replica_peers: tuple[Peer, ...] = ()
    """Where to send copies of its state."""
    replica_sources: tuple[Peer, ...] = ()
    """Who holds the state of its slot, when it may not hold it itself."""
    delay_s: float = 0.0
    """Wait this long first: the backoff of a crash loop."""


class StopRanks(Order, frozen=True, kw_only=True, tag="stop_ranks.v1"):
    """The round is over: collect evidence, stop every rank, join again.

    Rendezvous sends it to all agents at once.
    """

    cause: str
    """As in `round_ended`."""
    incident: str | None = None
    """The incident that the evidence belongs to."""
    evidence_s: float = 0.0
    """Evidence may take so long; 0 for none."""
    grace_s: float = 0.0
    """From SIGTERM to SIGKILL."""


class CollectEvidence(Order, frozen=True, kw_only=True, tag="collect_evidence.v1"):
    """Gather evidence from outside the ranks, which go on; on behalf of attribution."""

    incident: str
    """The incident that it belongs to."""
    evidence: tuple[str, ...]
    """Which, as in `evidence_collected`; what is not known is reported as missing."""
    within_s: float
    """What is not there by then is reported as missing."""
    ranks: tuple[Int, ...] = ()
    """From these global ranks; empty for all of the node's."""


class SaveCheckpoint(Order, frozen=True, kw_only=True, tag="save_checkpoint.v1"):
    """Save at the next step boundary, then go on or stop.

    On behalf of an operator, or because the nodes are about to be taken away.
    """

    occasion: str
    """`requested` or `preemption`."""
    after_step: Int | None = None
    """The step after which every rank saves; None while it is still being agreed."""
    then_stop: bool = False
    """The script is told that it should stop."""
    within_s: float | None = None
    """How much time there is."""


class RunChecks(Order, frozen=True, kw_only=True, tag="run_checks.v1"):
    """Examine the node now and record what was found; on behalf of health or an operator."""

    checks: tuple[str, ...] = ()
    """Which; empty for all that may run beside a training."""
    occasion: str = "operator"
    """As in `node_check_finished`."""
    within_s: float = 60.0
    """A check that takes longer says `unknown`."""


class CopyReplica(Order, frozen=True, kw_only=True, tag="copy_replica.v1"):
    """Send what you hold of a slot's state to another node; on behalf of the catalog."""

    owner_slot: Int
    """Whose state."""
    step: Int
    """Of which step."""
    to: Peer
    """Who shall have it."""


class DropReplica(Order, frozen=True, kw_only=True, tag="drop_replica.v1"):
    """Forget what you hold of a slot's state; on behalf of the catalog.

    Enough others have it, or it was quarantined.
    """

    owner_slot: Int
    """Whose state."""
    step: Int
    """Of which step."""


class LeaveJob(Order, frozen=True, kw_only=True, tag="leave_job.v1"):
    """You are no longer needed: stop what runs, clean up, exit."""

    exit_code: Int
    """What `everstep run` exits with."""
    state: str
    """What became of the job, as in `job_ended` or `allocation_ended`; or `excluded`."""
    grace_s: float = 0.0
    """From SIGTERM to SIGKILL, where ranks still run."""
