"""Jobs, what they run, and when their allocations begin and end."""

from collections.abc import Mapping

from everstep.messages.base import Count, Fact, Int, Name, Part


class JobSpec(Part, frozen=True, kw_only=True):
    """What a job is meant to be: the same from every agent, or the agent is refused."""

    name: str
    """For people; the job's id is what names it elsewhere."""
    labels: Mapping[str, str]
    """Free, for finding jobs again: `{"team": "vision", "model": "vit-l"}`."""
    command: tuple[str, ...]
    """What each rank runs, with secrets already masked."""
    config_fingerprint: str
    """A hash of command, settings and environment: tells two attempts apart."""
    nodes_min: Count
    """The smallest number of slots that a round may have."""
    nodes_max: Count
    """The largest; the same as `nodes_min` for a fixed world."""
    ranks_per_node: Int
    """Processes on each node."""
    spares: Int = 0
    """Nodes wanted beyond `nodes_max`, joined and warm."""
    slots_per_unit: Int = 1
    """The world grows and shrinks by whole units of this number of slots."""
    max_restarts: Int | None = None
    """The restart budget as configured; None for no limit."""
    max_restarts_per_hour: Int | None = None
    """How many of them within an hour; None for no limit of its own."""
    no_progress_limit: Int | None = None
    """Rounds in a row that may end without a new step; None for no limit."""
    slots_per_segment: Int = 1
    """This number of adjacent slots must be in one network domain."""
    slots_per_group: Int = 1
    """This number of adjacent slots must be in one replacement group; a group leaves as a whole.
    1: nodes are replaced one by one."""
    join_within_s: float | None = None
    """How long a round may take to form; None for what rendezvous is set to."""
    stop_grace_s: float = 3.0
    """From SIGTERM to SIGKILL in a round that is broken."""
    launcher: Name = ""
    """The launcher that starts the ranks and counts restarts itself: `torchrun`; empty where agents
    do."""
    launcher_restarts: Int | None = None
    """The limit of that launcher on each node; None if it is not known."""
    enforce: tuple[str, ...] = ()
    """Rules that act for this job instead of only being recorded: `stop` (all that make another
    failure probable), `no_progress` (that limit alone)."""


class JobStarted(Fact, frozen=True, kw_only=True, tag="job_started.v1"):
    """A job exists from now on; rendezvous sends it once, when its first agent joins."""

    spec: JobSpec
    """What it is meant to be."""
    world_size: Count
    """Ranks in its first round, if all goes as asked."""
    allocation: Name
    """The allocation that began it."""
    user: Name = ""
    """Who started it, as the node's operating system says."""
    version: Name = ""
    """The release of Everstep that took it on."""


class JobChanged(Fact, frozen=True, kw_only=True, tag="job_changed.v1"):
    """A later allocation asks for something else; rendezvous sends it with what holds now."""

    spec: JobSpec
    """What it is meant to be from now on."""
    changed: tuple[str, ...]
    """The names of the fields of `spec` that differ from before."""
    allocation: Name
    """The allocation that asked."""


class JobEnded(Fact, frozen=True, kw_only=True, tag="job_ended.v1"):
    """A job is over for good; rendezvous sends it once, or, in attach mode, slot 0's agent.

    A preempted or requeued job has not ended: only its allocation has.
    """

    state: Name
    """`done`, `failed` (budget spent or nothing to restore), `stopped` (on advice or by
    an operator) or `unknown` (run by another launcher, and nobody saw how it ended)."""
    exit_code: Int | None
    """What `everstep run` exits with on every node; None where nobody saw it."""
    reason: str
    """Why, past which limit."""
    last_step: Count | None = None
    """The last step that the training reached."""
    rounds: Count = 0
    """How many rounds it took."""
    incident: Name | None = None
    """The incident that ended it, if one did."""


class AllocationStarted(Fact, frozen=True, kw_only=True, tag="allocation_started.v1"):
    """The agents of a job were started; rendezvous sends it when the first of them joins."""

    allocation: Name
    """Its id, the same on all of its nodes."""
    scheduler: Name
    """Who started the agents: `slurm`, `kubernetes`, `none` (a person), or another's name."""
    scheduler_job: Name = ""
    """The scheduler's own id of the allocation; empty without a scheduler."""
    attempt: Count = 0
    """How often the scheduler had requeued the job before."""
    nodes: tuple[Name, ...] = ()
    """The nodes that the scheduler promised, where it says."""
    time_limit_s: float | None = None
    """How long the scheduler lets it live, where it says."""
    grace_s: float | None = None
    """How long the scheduler waits between its notice and the kill, where it says."""
    config_fingerprint: str = ""
    """That of the spec in force."""


class AllocationEnded(Fact, frozen=True, kw_only=True, tag="allocation_ended.v1"):
    """No agent of an allocation is left; rendezvous sends it, also for one that vanished."""

    allocation: Name
    """Its id."""
    state: Name
    """`done`, `failed`, `stopped`, `preempted`, `requeued`, or `lost` (it fell silent)."""
    reason: str
    """Why, and who reported it."""
    exit_code: Int | None = None
    """What its agents exited with; None when they vanished."""
    lasted_s: float | None = None
    """From its start, where the sender saw all of it."""
