"""Preemption: when it was announced, who knows, and whether the last save made it."""

from everstep.messages.base import Count, Fact, Name, RoundFact, Time


class PreemptionNoticed(Fact, frozen=True, kw_only=True, tag="preemption_noticed.v1"):
    """A node is about to be taken away; its agent sends this once for each notice."""

    node: Name
    """The node."""
    origin: Name
    """Where the notice came from: `signal`, `slurm`, `kubernetes`, `cloud` or `operator`."""
    reason: str
    """The notice itself: `SIGUSR1`, `scheduled maintenance at 14:00` …"""
    grace_s: float
    """How much time is left, as the agent believes."""
    deadline: Time | None = None
    """When that time ends by the wall clock, where the notice names a time."""
    is_whole_job: bool = True
    """All nodes of the job are concerned."""


class PreemptionPlanned(RoundFact, frozen=True, kw_only=True, tag="preemption_planned.v1"):
    """What will be done about a notice; rendezvous sends this."""

    plan: str
    """`save_and_exit`, `replace` (a spare takes the slot), `shrink` or `ignore`."""
    reason: str
    """Why this plan was chosen."""
    stop_after_step: Count | None = None
    """The step after which every rank stops, once it is known."""
    nodes: tuple[Name, ...] = ()
    """The nodes that are taken away."""
    incident: Name | None = None
    """The incident that the preemption opened or belongs to."""


class PreemptionAcknowledged(
    RoundFact, frozen=True, kw_only=True, tag="preemption_acknowledged.v1"
):
    """The script has seen that it should stop; each node's agent sends this."""

    node: Name
    """The node."""
    step: Count
    """The step that the node's ranks had finished."""
    waited_s: float = 0.0
    """The time since the notice."""


class PreemptionSaved(RoundFact, frozen=True, kw_only=True, tag="preemption_saved.v1"):
    """The last state is durable, in time; slot 0's agent sends this."""

    step: Count
    """The step whose state is durable."""
    tier: Name
    """The tier."""
    left_s: float
    """How much of the grace period was left."""


class PreemptionMissed(RoundFact, frozen=True, kw_only=True, tag="preemption_missed.v1"):
    """The grace period ended before the last state was durable.

    The node's agent sends this while it can, otherwise rendezvous.
    """

    node: Name
    """The node."""
    reason: str
    """What was not finished: the step, the copy, the write."""
    step: Count | None = None
    """The last step that was finished."""
    saved_step: Count | None = None
    """The newest step whose state is durable."""
    over_s: float = 0.0
    """An estimate of how much more time the save needed."""
