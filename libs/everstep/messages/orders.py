"""Orders to agents: small, each with its round, never the whole table."""

from everstep.messages.base import Count, Int, Name, Order, Part
from everstep.messages.beats.progress import WardenPlace


class Peer(Part, frozen=True, kw_only=True):
    """Another agent: what an agent must know to exchange states with it."""

    node: Name
    """The node."""
    slot: Count
    """The slot of that node."""
    address: Name
    """The address of its replica server."""
    port: Int
    """The port of its replica server."""


class StandBy(Order, frozen=True, kw_only=True, tag="stand_by.v1"):
    """You have no slot in this round: stay joined, checked and warm."""


class AwaitRound(Order, frozen=True, kw_only=True, tag="await_round.v1"):
    """No round runs, and none forms yet: stay joined, and show the reason on the console.

    Rendezvous sends this to all agents while it waits for nodes, or delays the next round
    because rounds fail at once; the reason has the duration.
    """


class StartRanks(Order, frozen=True, kw_only=True, tag="start_ranks.v1"):
    """You hold a slot: start its ranks. Rendezvous sends this to each member of a new round.

    The order has what torchrun's environment variables need, and no more.
    """

    slot: Count
    """The node's slot: GROUP_RANK."""
    slots: Int
    """The number of slots: GROUP_WORLD_SIZE."""
    first_rank: Count
    """The global rank of the node's first process."""
    ranks: Count
    """How many ranks to start: LOCAL_WORLD_SIZE."""
    world_size: Count
    """WORLD_SIZE."""
    master_address: str
    """MASTER_ADDR."""
    master_port: Int
    """MASTER_PORT, never used by an earlier round."""
    reached_step: Count | None = None
    """The step that the training had reached before, if the script numbers its steps."""
    restarts: Count = 0
    """TORCHELASTIC_RESTART_COUNT."""
    max_restarts: Int | None = None
    """TORCHELASTIC_MAX_RESTARTS; None for no limit."""
    incident: Name | None = None
    """The incident from which the job recovers with this round, if any."""
    replica_peers: tuple[Peer, ...] = ()
    """The agents to which this node sends copies of its state."""
    replica_sources: tuple[Peer, ...] = ()
    """The agents that hold the state of this slot, in case this node does not."""
    replica_key: str = ""
    """The secret by which agents of the job authenticate to each other."""
    replica_parts_needed: Int = 1
    """How many of the peers' parts restore the state; 1 where each peer holds all of it."""

    def __repr__(self) -> str:
        where = f"round={self.round}, slot={self.slot}, slots={self.slots}"
        return f"StartRanks(id={self.id!r}, job={self.job!r}, {where}, replica_key='***')"


class StopRanks(Order, frozen=True, kw_only=True, tag="stop_ranks.v1"):
    """The round is over: collect evidence, stop every rank, join again.

    Rendezvous sends this to all agents at once.
    """

    cause: Name
    """As in `round_ended`."""
    incident: Name | None = None
    """The incident that the evidence belongs to."""
    evidence_s: float = 0.0
    """How long the agent may collect evidence; 0 for none."""
    grace_s: float = 0.0
    """The time from SIGTERM to SIGKILL."""
    cause_within_s: float = 0.0
    """How long ranks may end by themselves before SIGTERM, because so far only consequences are
    known.

    The same order comes with 0 when the cause is known.
    """
    check: Name = ""
    """For the cause `check_failed`: the check that failed."""
    accused: tuple[Name, ...] = ()
    """For the cause `check_failed`: the nodes on which the check fails, while others pass it."""
    weight: Int = 0
    """How well `reason` explains the reports so far; an order with a smaller one is older."""
    are_kept: bool = False
    """Ranks that survive rounds are parked, although the cause alone does not tell: the round
    ends as planned, for nodes that come or go."""


class GroupPosition(Part, frozen=True, kw_only=True):
    """How far a rank has come in the collectives of one process group."""

    group: Name
    """The name of the group, which is the same in all its ranks."""
    entered: Int
    """The number of the last collective of the group that the rank has entered."""


class NameExcuse(Order, frozen=True, kw_only=True, tag="name_excuse.v1"):
    """A rank has stalled: report at once if one of your ranks may be the reason.

    A rank may be the reason if it stopped earlier, or still works on the same step, within its
    own limit.
    """

    node: Name
    """The node of the rank that has stalled."""
    rank: Count
    """The rank that has stalled."""
    waited_s: float
    """The time since its last progress."""
    step: Count | None = None
    """The last step that the stalled rank finished."""
    entered: Int | None = None
    """As in `report`; older releases read it instead of `entered_in`."""
    entered_in: tuple[GroupPosition, ...] = ()
    """As in `report`: a rank in a later collective of one of these groups waits for the stalled
    rank, and is not its excuse."""
    within_s: float = 0.5
    """A node that has not answered by then has no excuse for the stalled rank."""


class BeatNow(Order, frozen=True, kw_only=True, tag="beat_now.v1"):
    """Beat at once: health has not heard the node for a moment.

    The order has its own subject, and nothing depends on it: the next beat is due anyway.
    """

    node: Name
    """The node."""
    wardens: tuple[WardenPlace, ...] = ()
    """The wardens of other nodes that are not heard: ask whether they answer, and beat once
    more."""


class CollectEvidence(Order, frozen=True, kw_only=True, tag="collect_evidence.v1"):
    """Collect evidence from outside the ranks, which keep running.

    A person wants it; or ranks stand still in a round that goes on, because stalls are observed.
    """

    incident: Name
    """The incident that the evidence belongs to."""
    evidence: tuple[str, ...]
    """The kinds of evidence, as in `evidence_collected`; an unknown kind is reported as missing.
    Empty for all that can be collected from living ranks."""
    within_s: float
    """How long to collect; the rest is reported as missing."""
    ranks: tuple[Int, ...] = ()
    """Only from these global ranks; empty for all ranks of the node."""


class SaveCheckpoint(Order, frozen=True, kw_only=True, tag="save_checkpoint.v1"):
    """Save at the next step boundary, then continue or stop.

    An operator wants it, or the nodes are about to be taken away.
    """

    occasion: Name
    """`requested` or `preemption`."""
    after_step: Int | None = None
    """The step after which every rank saves; None before the agents have agreed on it."""
    then_stop: bool = False
    """The script should stop after the save."""
    then_leave: bool = False
    """All nodes are taken away: the agent passes the notice on to ranks that count no steps by the
    SDK, and leaves when they have ended."""
    within_s: float | None = None
    """How much time there is."""


class SaveParked(Order, frozen=True, kw_only=True, tag="save_parked.v1"):
    """Your parked ranks hold states that no save has: they save them, and stay parked.

    Perhaps no round follows. The parked ranks of all nodes that have got this order save together.
    """

    first_rank: Count
    """The number of the node's first parked rank, among all that save."""
    world_size: Count
    """How many ranks save."""
    master_address: str
    """The address at which they meet: that of the node with number 0."""
    master_port: Int
    """The port at which they meet."""
    within_s: float
    """How much time there is."""
    grace_s: float = 0.0
    """The time from SIGTERM to SIGKILL, for ranks that take longer."""


class RunChecks(Order, frozen=True, kw_only=True, tag="run_checks.v1"):
    """Examine the node now, and record the results; health or an operator wants it."""

    checks: tuple[str, ...] = ()
    """The checks to run; empty for all that may run during a training."""
    occasion: Name = "operator"
    """As in `node_check_finished`; or `compare`: report the state of the check, but record
    nothing."""
    within_s: float = 60.0
    """The result of a check that takes longer is `unknown`."""


class NetworkPeer(Part, frozen=True, kw_only=True):
    """A node of a network test, and the port that it opens for the test."""

    node: Name
    """The node."""
    address: Name
    """The address at which the node listens."""
    port: Int
    """The port, for this test only."""


class MeasureNetwork(Order, frozen=True, kw_only=True, tag="measure_network.v1"):
    """Some nodes measure the network in pairs. All agents receive this.

    An operator wants it, or the next round waits for it.

    The pairs of each turn follow from the order of the peers. The figures of each agent are in
    its `network_measured`.
    """

    peers: tuple[NetworkPeer, ...]
    """The nodes of the test; no other node takes part."""
    token: str
    """The secret of this test, by which both ends of a connection authenticate to each other."""
    turns: Int
    """The number of turns: each node has that number of partners, or one fewer."""
    turn_s: float
    """The duration of a turn."""
    has_sums: bool = False
    """Each pair also adds numbers over the backend that ranks use: NCCL where torch finds GPUs, one
    pair of processes for each GPU, at ports from that of the peer on; otherwise gloo."""
    lead_s: float = 0.0
    """How much later than its turn a pair's sums may end, because torch may still be imported."""

    def __repr__(self) -> str:
        return f"MeasureNetwork(id={self.id!r}, job={self.job!r}, turns={self.turns}, token='***')"


class CopyReplica(Order, frozen=True, kw_only=True, tag="copy_replica.v1"):
    """Send your copy of a slot's state to another node; the catalog wants it."""

    owner_slot: Count
    """The slot whose state it is."""
    step: Count
    """The step."""
    to: Peer
    """The node that receives the copy."""


class ReleaseImages(Order, frozen=True, kw_only=True, tag="release_images.v1"):
    """Let the quarantined states of a step in your memory be restored again.

    An operator wants it. An agent that had such a state reports it in `checkpoint_released`.
    """

    step: Count
    """The step."""
    by: Name
    """The operator."""


class InjectFault(Order, frozen=True, kw_only=True, tag="inject_fault.v1"):
    """Make a fault on purpose, in this round. A person sends this to a job that allows faults.

    The `fault_injected` that follows has the id of this order; if the fault is refused, the
    `operator_acted` with the reason has it.
    """

    fault: str
    """As in `fault_injected`."""
    by: Name
    """The person."""
    rank: Count | None = None
    """The rank that is hit; None for the node's agent."""
    after_step: Int | None = None
    """The fault comes after this step at the earliest."""
    for_s: float | None = None
    """How long the fault lasts; None for its usual duration."""
    amount: Int | None = None
    """The size of the fault, in a unit that depends on its kind; None for the usual size."""
    target: str = ""
    """What the fault hits, where its kind needs that: a section, a folder."""


class LeaveJob(Order, frozen=True, kw_only=True, tag="leave_job.v1"):
    """You are no longer needed: stop all ranks, clean up, exit."""

    exit_code: Int
    """The exit code of `everstep run`."""
    state: Name
    """The end of the job, as in `job_ended` or `allocation_ended`; or `excluded`."""
    grace_s: float = 0.0
    """The time from SIGTERM to SIGKILL, where ranks still run."""
