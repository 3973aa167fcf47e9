"""Orders to agents: small, each with its round, never the whole table."""

from everstep.messages.base import Count, Int, Name, Order, Part
from everstep.messages.beats.progress import WardenPlace


class Peer(Part, frozen=True, kw_only=True):
    """Another agent, as one that streams checkpoint bytes must know it."""

    node: Name
    """The node."""
    slot: Count
    """Its slot."""
    address: Name
    """Where it listens."""
    port: Int
    """The port of its replica server."""


class StandBy(Order, frozen=True, kw_only=True, tag="stand_by.v1"):
    """You have no slot in this round: stay joined, checked and warm."""


class AwaitRound(Order, frozen=True, kw_only=True, tag="await_round.v1"):
    """No round runs, and none forms yet: stay joined, and show the reason on the console.

    Rendezvous sends it to all, when it waits for nodes or for the backoff of a crash loop; its
    reason says for how long.
    """


class StartRanks(Order, frozen=True, kw_only=True, tag="start_ranks.v1"):
    """You hold a slot: start its ranks. Rendezvous sends one to each member when a round forms.

    What torchrun's environment variables need, and no more.
    """

    slot: Count
    """The node's slot: GROUP_RANK."""
    slots: Int
    """Slots in all: GROUP_WORLD_SIZE."""
    first_rank: Count
    """The global rank of its first process."""
    ranks: Count
    """How many to start: LOCAL_WORLD_SIZE."""
    world_size: Count
    """WORLD_SIZE."""
    master_address: str
    """MASTER_ADDR."""
    master_port: Int
    """MASTER_PORT, never used by an earlier round."""
    restarts: Count = 0
    """TORCHELASTIC_RESTART_COUNT."""
    max_restarts: Int | None = None
    """TORCHELASTIC_MAX_RESTARTS; None for no limit."""
    incident: Name | None = None
    """The incident that it recovers from, if any."""
    replica_peers: tuple[Peer, ...] = ()
    """Where to send copies of its state."""
    replica_sources: tuple[Peer, ...] = ()
    """Who holds the state of its slot, when it may not hold it itself."""
    replica_key: str = ""
    """What agents of the job prove to each other that they have. Secret."""
    replica_parts_needed: Int = 1
    """How many of the parts that its peers hold give the state back; 1 where each has all of it."""

    def __repr__(self) -> str:
        where = f"round={self.round}, slot={self.slot}, slots={self.slots}"
        return f"StartRanks(id={self.id!r}, job={self.job!r}, {where}, replica_key='***')"


class StopRanks(Order, frozen=True, kw_only=True, tag="stop_ranks.v1"):
    """The round is over: collect evidence, stop every rank, join again.

    Rendezvous sends it to all agents at once.
    """

    cause: Name
    """As in `round_ended`."""
    incident: Name | None = None
    """The incident that the evidence belongs to."""
    evidence_s: float = 0.0
    """How long the agent may collect evidence; 0 for none."""
    grace_s: float = 0.0
    """From SIGTERM to SIGKILL."""
    cause_within_s: float = 0.0
    """How long ranks may end by themselves before SIGTERM: only consequences are known yet.

    The same order comes with 0 when the cause is known.
    """
    check: Name = ""
    """For the cause `check_failed`: the check."""
    accused: tuple[Name, ...] = ()
    """For the cause `check_failed`: the nodes on which the check fails, while others pass it."""


class NameExcuse(Order, frozen=True, kw_only=True, tag="name_excuse.v1"):
    """A rank has stalled: report at once if a rank of yours may be what it waits for.

    That is one that stopped before it or works on in the same step, and is within its own limit.
    """

    node: Name
    """The node of the rank that has stalled."""
    rank: Count
    """The rank."""
    waited_s: float
    """Since its last progress."""
    step: Count | None = None
    """The last step that it finished."""
    entered: Int | None = None
    """As in `report`: who waits in a later collective of all ranks waits for it, and is none."""
    within_s: float = 0.5
    """Who has not answered by then has no excuse."""


class BeatNow(Order, frozen=True, kw_only=True, tag="beat_now.v1"):
    """Beat at once. Health has not heard the node for a moment, in which nothing else spoke for it.

    It travels apart from other orders, and nothing depends on it: the next beat is due anyway.
    """

    node: Name
    """The node."""
    wardens: tuple[WardenPlace, ...] = ()
    """Of nodes that are not heard: find out whether their wardens answer, and beat once more."""


class CollectEvidence(Order, frozen=True, kw_only=True, tag="collect_evidence.v1"):
    """Gather evidence from outside the ranks, which go on; on behalf of attribution."""

    incident: Name
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

    occasion: Name
    """`requested` or `preemption`."""
    after_step: Int | None = None
    """The step after which every rank saves; None while it is still being agreed."""
    then_stop: bool = False
    """Tell the script that it should stop."""
    then_leave: bool = False
    """All nodes go: the agent passes the notice on to ranks that count no steps by the SDK, and
    leaves when they have ended."""
    within_s: float | None = None
    """How much time there is."""


class RunChecks(Order, frozen=True, kw_only=True, tag="run_checks.v1"):
    """Examine the node now and record what was found; on behalf of health or an operator."""

    checks: tuple[str, ...] = ()
    """The checks to run; empty for all that may run during a training."""
    occasion: Name = "operator"
    """As in `node_check_finished`; or `compare`: report the state of the check, and record
    nothing."""
    within_s: float = 60.0
    """A check that takes longer says `unknown`."""


class NetworkPeer(Part, frozen=True, kw_only=True):
    """A node that measures the network, and where it lets others in meanwhile."""

    node: Name
    """The node."""
    address: Name
    """Where it listens."""
    port: Int
    """The port, for this test only."""


class MeasureNetwork(Order, frozen=True, kw_only=True, tag="measure_network.v1"):
    """Some nodes measure the network in pairs; on behalf of an operator. All agents hear it.

    Who is with whom in which turn follows from the order of the peers. What each agent found is
    in its `network_measured`.
    """

    peers: tuple[NetworkPeer, ...]
    """Who takes part, and nobody else."""
    token: str
    """What both ends prove to each other that they have; made for this test only, and secret."""
    turns: Int
    """How many turns there are: each node has as many partners, or one fewer."""
    turn_s: float
    """How long a turn is."""

    def __repr__(self) -> str:
        return f"MeasureNetwork(id={self.id!r}, job={self.job!r}, turns={self.turns}, token='***')"


class CopyReplica(Order, frozen=True, kw_only=True, tag="copy_replica.v1"):
    """Send what you hold of a slot's state to another node; on behalf of the catalog."""

    owner_slot: Count
    """The slot whose state it is."""
    step: Count
    """The step."""
    to: Peer
    """The node that receives it."""


class ReleaseImages(Order, frozen=True, kw_only=True, tag="release_images.v1"):
    """Let the states of a step in your memory be restored again that were quarantined.

    On behalf of an operator. An agent that had such a state reports it in `checkpoint_released`.
    """

    step: Count
    """The step."""
    by: Name
    """Who wants it."""


class InjectFault(Order, frozen=True, kw_only=True, tag="inject_fault.v1"):
    """Make a fault on purpose, in this round. A person sends it, to a job that allows it.

    The `fault_injected` that follows has the id of this order, and so has the `operator_acted`
    that says why there is none.
    """

    fault: str
    """As in `fault_injected`."""
    by: Name
    """Who wants it."""
    rank: Count | None = None
    """In this rank; None for the node's agent."""
    after_step: Int | None = None
    """Not before this step is finished."""
    for_s: float | None = None
    """How long it lasts; None for what is usual for it."""
    amount: Int | None = None
    """How much, in a unit that depends on the fault; None for what is usual for it."""
    target: str = ""
    """What it hits, where the fault needs it: a section, a folder."""


class LeaveJob(Order, frozen=True, kw_only=True, tag="leave_job.v1"):
    """You are no longer needed: stop what runs, clean up, exit."""

    exit_code: Int
    """What `everstep run` exits with."""
    state: Name
    """What became of the job, as in `job_ended` or `allocation_ended`; or `excluded`."""
    grace_s: float = 0.0
    """From SIGTERM to SIGKILL, where ranks still run."""
