"""Jobs, what they run, and when their allocations begin and end."""

from collections.abc import Mapping

from everstep.messages.base import Count, Fact, Int, Name, Part


class JobSpec(Part, frozen=True, kw_only=True):
    """The specification of a job. An agent whose specification differs is refused."""

    name: str
    """A name for people; elsewhere the job is named by its id."""
    labels: Mapping[str, str]
    """Words of the user's choice, for finding jobs again: `{"team": "vision", "model":
    "vit-l"}`."""
    command: tuple[str, ...]
    """What each rank runs, with secrets already masked."""
    config_fingerprint: str
    """A hash of command, settings and environment, which tells two attempts apart."""
    nodes_min: Count
    """The smallest number of slots that a round may have."""
    nodes_max: Count
    """The largest number of slots; the same as `nodes_min` for a fixed world."""
    ranks_per_node: Int
    """Processes on each node."""
    spares: Int = 0
    """How many nodes beyond `nodes_max` should join and stay warm."""
    slots_per_unit: Int = 1
    """The world grows and shrinks by whole units; a unit has this number of slots."""
    max_restarts: Int | None = None
    """The configured number of restarts; None for no limit."""
    max_restarts_per_hour: Int | None = None
    """How many restarts the job may have within an hour; None for no such limit."""
    no_progress_limit: Int | None = None
    """Rounds in a row that may end without a new step; None for no limit."""
    slots_per_segment: Int = 1
    """A segment has this number of adjacent slots; all must be in one network domain."""
    slots_per_group: Int = 1
    """A replacement group has this number of adjacent slots, whose nodes are replaced together.
    With 1, nodes are replaced one by one."""
    join_within_s: float | None = None
    """How long a round may take to form; None for the setting of rendezvous."""
    stop_grace_s: float = 3.0
    """The time from SIGTERM to SIGKILL when a broken round is stopped."""
    launcher: Name = ""
    """Another launcher that starts the ranks and counts restarts itself, as `torchrun`; empty where
    agents start them."""
    launcher_restarts: Int | None = None
    """The other launcher's limit of restarts on each node; None if it is not known."""
    network_test: Name = "off"
    """When nodes measure the network in pairs before a round forms: `off`, `first` (before the
    first round of an allocation), or `failures` (also before each round after a failure that is not
    one of the program)."""
    enforce: tuple[str, ...] = ()
    """Rules that act for this job instead of only being recorded: `stop` (all that make another
    failure probable), `no_progress` (that limit alone)."""


class JobStarted(Fact, frozen=True, kw_only=True, tag="job_started.v1"):
    """A job exists from now on; rendezvous sends this once, when the first agent joins."""

    spec: JobSpec
    """The job's specification."""
    world_size: Count
    """The number of ranks in the first round, if enough nodes join."""
    allocation: Name
    """The allocation that began the job."""
    user: Name = ""
    """The user who started the job, by the node's operating system."""
    version: Name = ""
    """The release of Everstep that accepted the job."""


class JobChanged(Fact, frozen=True, kw_only=True, tag="job_changed.v1"):
    """A later allocation has another specification; rendezvous sends the one that holds now."""

    spec: JobSpec
    """The job's specification from now on."""
    changed: tuple[str, ...]
    """The names of the fields of `spec` that differ from before."""
    allocation: Name
    """The allocation that brought the new specification."""


class JobEnded(Fact, frozen=True, kw_only=True, tag="job_ended.v1"):
    """A job is over for good; rendezvous sends this once (in attach mode, slot 0's agent).

    A preempted or requeued job has not ended: only its allocation has.
    """

    state: Name
    """`done`, `failed` (budget spent or nothing to restore), `stopped` (on advice or by
    an operator) or `unknown` (run by another launcher, and nobody saw how it ended)."""
    exit_code: Int | None
    """The exit code of `everstep run` on every node; None where nobody saw it."""
    reason: str
    """Why the job ended, and which limit was passed."""
    last_step: Count | None = None
    """The last step that the training reached."""
    rounds: Count = 0
    """How many rounds the job had."""
    incident: Name | None = None
    """The incident that ended the job, if one did."""


class AllocationStarted(Fact, frozen=True, kw_only=True, tag="allocation_started.v1"):
    """The agents of a job were started; rendezvous sends it when the first of them joins."""

    allocation: Name
    """The allocation's id, the same on all of its nodes."""
    scheduler: Name
    """Who started the agents: `slurm`, `kubernetes`, `none` (a person), or another's name."""
    scheduler_job: Name = ""
    """The scheduler's own id of the allocation; empty without a scheduler."""
    attempt: Count = 0
    """How often the scheduler had requeued the job before."""
    nodes: tuple[Name, ...] = ()
    """The nodes that the scheduler promised, where the scheduler names them."""
    time_limit_s: float | None = None
    """How long the allocation may last, where the scheduler has a limit."""
    grace_s: float | None = None
    """How long the scheduler waits between its notice and the kill, where that is known."""
    config_fingerprint: str = ""
    """The fingerprint of the job's specification that holds."""


class AllocationEnded(Fact, frozen=True, kw_only=True, tag="allocation_ended.v1"):
    """No agent of an allocation is left; rendezvous sends this, also when agents vanished."""

    allocation: Name
    """The allocation's id."""
    state: Name
    """`done`, `failed`, `stopped`, `preempted`, `requeued`, or `lost` (its agents fell silent)."""
    reason: str
    """Why the allocation ended, and who reported the end."""
    exit_code: Int | None = None
    """The exit code of the agents; None when they vanished."""
    lasted_s: float | None = None
    """How long the allocation lasted, where the sender saw its start."""
