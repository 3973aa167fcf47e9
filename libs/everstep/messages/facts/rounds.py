"""Nodes that join and leave, and the rounds that they form."""

from everstep.messages.base import Count, Fact, Int, Name, Part, RoundFact


class Member(Part, frozen=True, kw_only=True, array_like=True):
    """A node with a slot, as `[slot, node, first rank, ranks]`.

    An array, because a round of 12,500 nodes must fit into one message of 1 MiB.
    """

    slot: Count
    """Its place in the world, kept from round to round."""
    node: Name
    """The node that holds the slot."""
    first_rank: Count
    """The global rank of its first process; the others follow without a gap."""
    ranks: Count
    """How many processes it runs."""


class Replacement(Part, frozen=True, kw_only=True):
    """A slot that changed hands between two rounds."""

    slot: Count
    """The slot."""
    node: Name
    """Who holds it now."""
    was: str
    """Who held it before."""
    reason: str
    """Why the previous holder lost it."""


class NodeJoined(Fact, frozen=True, kw_only=True, tag="node_joined.v1"):
    """An agent was accepted for the next round; rendezvous sends it for each."""

    node: Name
    """The node's id."""
    allocation: Name
    """The allocation that it came with."""
    ranks: Count
    """How many processes it can run."""
    address: Name
    """Where other nodes reach it: a host name or IP address."""
    infra_rank: Int | None = None
    """Its place by the scheduler or by explicit wish, where there is one."""
    failure_domain: Name = ""
    """What fails together with it: a rack, a power unit; empty when not known."""
    topology: tuple[str, ...] = ()
    """Where it sits in the network, outermost first: `("block-3", "rack-12")`."""
    group: Name = ""
    """The nodes that are replaced together with it, in a job with replacement groups."""
    last_round: Int | None = None
    """The last round that it took part in, as it remembers."""
    warm: bool = False
    """It holds a process that has imported the script's modules already."""
    waited_s: float = 0.0
    """From the agent's first attempt until it was accepted."""
    device: Name = ""
    """What its ranks run on: `NVIDIA H100 80GB HBM3`, or `cpu`."""
    version: Name = ""
    """The agent's release."""
    nvlink_domain: Name = ""
    """The NVLink domain of its GPUs, named by their ClusterUUID; empty for none."""


class NodeRefused(Fact, frozen=True, kw_only=True, tag="node_refused.v1"):
    """An agent may not join; rendezvous sends it once per cause, not once per attempt."""

    node: Name
    """The node's id."""
    cause: Name
    """`unhealthy`, `excluded`, `duplicate` (another node has its id), `different_job` (not
    the job's spec), `wrong_version`, `misconfigured`, `stale` or `job_over`."""
    reason: str
    """Why, and what would let it join."""
    checks: tuple[str, ...] = ()
    """The checks that failed, for `unhealthy`."""
    retry_after_s: float | None = None
    """When to try again; None for never."""


class NodeLeft(Fact, frozen=True, kw_only=True, tag="node_left.v1"):
    """An agent left; rendezvous sends it. An agent that only fell silent is `node_lost`."""

    node: Name
    """The node's id."""
    cause: Name
    """`done`, `preempted`, `drained`, `excluded`, `refused`, `operator` or `failed`."""
    reason: str
    """Why, in the agent's or operator's words."""
    slot: Count | None = None
    """The slot that it held, if any."""
    exit_code: Int | None = None
    """What its `everstep run` exits with, where it said."""


class RoundWaiting(RoundFact, frozen=True, kw_only=True, tag="round_waiting.v1"):
    """A round cannot form yet; rendezvous sends it when it starts to wait and on change."""

    joined: Count
    """Nodes that have joined."""
    needed: Count
    """Nodes that a round needs at least."""
    waited_s: float
    """Since the round began to form."""
    limit_s: float
    """How long it may take before the job gives up."""
    missing: tuple[str, ...] = ()
    """Slots' previous holders that are not back, where they are known."""
    reason: str = ""
    """What else stands in the way: an incomplete unit, a topology, a last call."""


class RoundFormed(RoundFact, frozen=True, kw_only=True, tag="round_formed.v1"):
    """The members of a round are decided; rendezvous sends it after its compare-and-set."""

    members: tuple[Member, ...]
    """Every slot, in order."""
    world_size: Count
    """Ranks in all."""
    waited_s: float
    """From the end of the previous round, or from the first join, until now."""
    allocation: Name
    """The allocation that it runs in."""
    spares: tuple[Name, ...] = ()
    """Nodes that have joined and stand by."""
    cause: Name = "start"
    """`start`, `restart`, `grow`, `shrink` or `operator`."""
    reason: str = ""
    """Why these and not others, where there was a choice."""
    replaced: tuple[Replacement, ...] = ()
    """The slots that changed hands."""
    restarts: Count = 0
    """Restarts of this job so far."""
    incident: Name | None = None
    """The incident that it recovers from, if any."""


class RoundStarted(RoundFact, frozen=True, kw_only=True, tag="round_started.v1"):
    """All ranks of a round run; rendezvous sends it when the last agent has reported it."""

    start_s: float
    """From the orders until the last rank ran."""
    master_address: str
    """Where the ranks meet: slot 0's address."""
    master_port: Int
    """A port that no earlier round used."""
    warm_ranks: Int = 0
    """How many ranks were forked from a warm process."""
    slowest_node: str = ""
    """The node that the others waited for."""


class RoundEnded(RoundFact, frozen=True, kw_only=True, tag="round_ended.v1"):
    """A round is over; rendezvous sends it with the first report that ended it."""

    cause: Name
    """`done`, `rank_exited`, `rank_stalled`, `node_lost`, `node_left`, `preempted`,
    `operator`, `grow`, `start_failed` or `document_lost`."""
    reason: str
    """What happened, to whom, past which limit."""
    lasted_s: float | None = None
    """Since it formed; None if it never did."""
    first_step: Int | None = None
    """The step from which it went on."""
    last_step: Count | None = None
    """The last step that it reached."""
    node: Name | None = None
    """The node that the first report is about; attribution may blame another."""
    rank: Count | None = None
    """The rank that the first report is about."""
    incident: Name | None = None
    """The incident that it opened or joined; None for a good end."""
    trigger: Name | None = None
    """The id of the fact that ended it."""
