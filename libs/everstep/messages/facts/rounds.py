"""Nodes that join and leave, and the rounds that they form."""

from everstep.messages.base import Count, Fact, Int, Name, Part, RoundFact


class Member(Part, frozen=True, kw_only=True, array_like=True):
    """A node with a slot, as `[slot, node, first rank, ranks]`.

    An array, because a round of 12,500 nodes must fit into one message of 1 MiB.
    """

    slot: Count
    """The node's place in the world, kept from round to round."""
    node: Name
    """The node that holds the slot."""
    first_rank: Count
    """The global rank of the node's first process; the other ranks follow without a gap."""
    ranks: Count
    """How many ranks the node runs."""


class Replacement(Part, frozen=True, kw_only=True):
    """A slot that changed hands between two rounds."""

    slot: Count
    """The slot."""
    node: Name
    """The node that holds the slot now."""
    was: str
    """The node that held the slot before."""
    reason: str
    """Why the previous holder lost it."""


class NodeJoined(Fact, frozen=True, kw_only=True, tag="node_joined.v1"):
    """A node was accepted for the next round; rendezvous sends this for each node."""

    node: Name
    """The node's id."""
    allocation: Name
    """The allocation that the node belongs to."""
    ranks: Count
    """How many ranks the node can run."""
    address: Name
    """The host name or IP address at which other nodes reach the node."""
    infra_rank: Int | None = None
    """The node's place by the scheduler or by an option, where there is one."""
    failure_domain: Name = ""
    """The nodes that can fail together with this node, as a rack or a power unit; empty when not
    known."""
    topology: tuple[str, ...] = ()
    """Where the node is in the network, outermost first: `("block-3", "rack-12")`."""
    group: Name = ""
    """The node's replacement group: its nodes are replaced together."""
    last_round: Int | None = None
    """The last round in which the node took part, as its agent remembers."""
    warm: bool = False
    """The node has a process that has already imported the script's modules."""
    waited_s: float = 0.0
    """From the agent's first attempt until it was accepted."""
    device: Name = ""
    """The device of the node's ranks: `NVIDIA H100 80GB HBM3`, or `cpu`."""
    version: Name = ""
    """The agent's release."""
    nvlink_domain: Name = ""
    """The NVLink domain of the node's GPUs, named by their ClusterUUID; empty for none."""


class NodeRefused(Fact, frozen=True, kw_only=True, tag="node_refused.v1"):
    """A node may not join; rendezvous sends this once per cause, not once per attempt."""

    node: Name
    """The node's id."""
    cause: Name
    """`unhealthy`, `excluded`, `duplicate` (another node has its id), `different_job` (another
    specification than the job's), `wrong_version`, `misconfigured`, `stale` or `job_over`."""
    reason: str
    """Why, and what must change so that the node may join."""
    checks: tuple[str, ...] = ()
    """The checks that failed, for `unhealthy`."""
    retry_after_s: float | None = None
    """When to try again; None for never."""


class NodeLeft(Fact, frozen=True, kw_only=True, tag="node_left.v1"):
    """An agent left; rendezvous sends this. For an agent that fell silent, see `node_lost`."""

    node: Name
    """The node's id."""
    cause: Name
    """`done`, `preempted`, `drained`, `excluded`, `refused`, `operator` or `failed`."""
    reason: str
    """Why, in the agent's or operator's words."""
    slot: Count | None = None
    """The slot that the node held, if any."""
    exit_code: Int | None = None
    """The exit code of the node's `everstep run`, where the agent reported it."""


class RoundWaiting(RoundFact, frozen=True, kw_only=True, tag="round_waiting.v1"):
    """A round cannot form yet; rendezvous sends this at the start of the wait and on change."""

    joined: Count
    """Nodes that have joined."""
    needed: Count
    """The smallest number of nodes with which the round can form."""
    waited_s: float
    """How long the round has been forming."""
    limit_s: float
    """After how long the job gives up."""
    missing: tuple[str, ...] = ()
    """The previous holders of slots that have not joined again, where they are known."""
    reason: str = ""
    """What else the round waits for: a whole unit, a topology, the last call for more nodes."""


class RoundFormed(RoundFact, frozen=True, kw_only=True, tag="round_formed.v1"):
    """The members of a round are decided and written; rendezvous sends this."""

    members: tuple[Member, ...]
    """The nodes with slots, in the order of the slots."""
    world_size: Count
    """The number of ranks."""
    waited_s: float
    """The time since the end of the previous round, or since the first join."""
    allocation: Name
    """The allocation whose nodes run the round."""
    spares: tuple[Name, ...] = ()
    """Nodes that have joined and stand by."""
    cause: Name = "start"
    """`start`, `restart`, `grow`, `shrink` or `operator`."""
    reason: str = ""
    """Why these nodes were chosen, where there was a choice."""
    replaced: tuple[Replacement, ...] = ()
    """The slots that have another node than in the previous round."""
    restarts: Count = 0
    """The number of restarts of this job so far."""
    incident: Name | None = None
    """The incident from which the job recovers with this round, if any."""


class RoundStarted(RoundFact, frozen=True, kw_only=True, tag="round_started.v1"):
    """All ranks of a round run; rendezvous sends this after the last agent's report."""

    start_s: float
    """The time from the orders until the last rank ran."""
    master_address: str
    """The address at which the ranks meet: that of slot 0's node."""
    master_port: Int
    """The port at which the ranks meet; no earlier round used it."""
    warm_ranks: Int = 0
    """How many ranks were forked from a warm process."""
    slowest_node: str = ""
    """The last node whose ranks all ran."""


class RoundEnded(RoundFact, frozen=True, kw_only=True, tag="round_ended.v1"):
    """A round is over; rendezvous sends this with the first report that ended the round."""

    cause: Name
    """`done`, `rank_exited`, `rank_stalled`, `node_lost`, `node_left`, `preempted`,
    `operator`, `grow`, `start_failed` or `document_lost`."""
    reason: str
    """What happened, to which rank or node, and which limit was passed."""
    lasted_s: float | None = None
    """The time since the round formed; None if it never did."""
    first_step: Int | None = None
    """The step from which the training continued in this round."""
    last_step: Count | None = None
    """The last step that the training had reported when this round was ended; the last
    `progress_made` of the round has the steps until its ranks were stopped."""
    node: Name | None = None
    """The node that the first report is about; attribution may blame another."""
    rank: Count | None = None
    """The rank that the first report is about."""
    incident: Name | None = None
    """The incident that this end opened or joined; None for a good end."""
    trigger: Name | None = None
    """The id of the fact that ended the round."""
