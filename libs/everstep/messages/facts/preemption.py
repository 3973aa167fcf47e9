"""Preemption: when it was announced, who knows, and whether the last save made it."""

from everstep.messages.base import Count, Fact, Name, RoundFact, Time


class PreemptionNoticed(Fact, frozen=True, kw_only=True, tag="preemption_noticed.v1"):
    """A node is about to be taken away; its agent sends it once a notice."""

    node: Name
    """The node."""
    origin: Name
    """Where the notice came from: `signal`, `slurm`, `kubernetes`, `cloud` or `operator`."""
    reason: str
    """The notice itself: `SIGUSR1`, `scheduled maintenance at 14:00` …"""
    grace_s: float
    """How long is left, as the agent believes."""
    deadline: Time | None = None
    """When it ends by the wall clock, where the notice says."""
    is_whole_job: bool = True
    """All nodes of the job are concerned."""


class PreemptionPlanned(RoundFact, frozen=True, kw_only=True, tag="preemption_planned.v1"):
    """What will be done about a notice; rendezvous sends it."""

    plan: str
    """`save_and_exit`, `replace` (a spare takes the slot), `shrink` or `ignore`."""
    reason: str
    """Why that."""
    stop_after_step: Count | None = None
    """The step boundary at which every rank stops, once it is known."""
    nodes: tuple[Name, ...] = ()
    """The nodes that go."""
    incident: Name | None = None
    """The incident that it opened or belongs to."""


class PreemptionAcknowledged(
    RoundFact, frozen=True, kw_only=True, tag="preemption_acknowledged.v1"
):
    """The script has seen that it should stop; each node's agent sends it."""

    node: Name
    """The node."""
    step: Count
    """The step that its ranks had finished."""
    waited_s: float = 0.0
    """From the notice until now."""


class PreemptionSaved(RoundFact, frozen=True, kw_only=True, tag="preemption_saved.v1"):
    """The last state is durable, within the grace; slot 0's agent sends it."""

    step: Count
    """The step that is safe."""
    tier: Name
    """Where."""
    left_s: float
    """How much of the grace was left."""


class PreemptionMissed(RoundFact, frozen=True, kw_only=True, tag="preemption_missed.v1"):
    """The grace ended before the last state was durable.

    The node's agent sends it while it can, else rendezvous.
    """

    node: Name
    """The node."""
    reason: str
    """What was still going on: the step, the copy, the write."""
    step: Count | None = None
    """The last step that was finished."""
    saved_step: Count | None = None
    """The newest step that is safe."""
    over_s: float = 0.0
    """How much more time it would have needed, estimated."""
