"""The processes of a round: started, stalled, exited, and their progress."""

from everstep.messages.base import BlobRef, Count, Fact, Int, Name, Part, RoundFact, Time


class ErrorRecord(Part, frozen=True, kw_only=True):
    """The exception that ended a rank, recorded inside it, without a decorator."""

    name: str
    """Its class, with its module: `torch.OutOfMemoryError`."""
    text: str
    """What it says, at most 4 KiB."""
    traceback: str = ""
    """The traceback, at most 64 KiB; the innermost frames are kept."""
    place: str = ""
    """The innermost frame of the user's own code: `train.py:88 in step`."""
    at: Time | None = None
    """When it was raised, by the node's clock."""
    chain: tuple[str, ...] = ()
    """The classes of the exceptions that it was raised from, outermost first."""


class RankFact(RoundFact, frozen=True, kw_only=True):
    """A fact about one rank of one round."""

    node: Name
    """The node that it runs on."""
    slot: Count
    """That node's slot."""
    rank: Count
    """Its global rank."""
    local_rank: Count
    """Its place on the node."""


class RankStarted(RankFact, frozen=True, kw_only=True, tag="rank_started.v1"):
    """A rank's process runs; its agent sends it."""

    pid: Count
    """Its process id on the node."""
    start: str
    """`warm` (forked from a ready process), `cold`, or `attached` (not started by us)."""
    start_s: float
    """From the order until it ran the user's script."""
    device: Name = ""
    """The id of its accelerator: `GPU-5e9c…`; empty on a CPU."""
    log: str = ""
    """Where the node keeps its output."""
    role: Name = ""
    """Its role group, for scripts whose ranks do different work."""
    cpus: str = ""
    """The CPUs that it was given by `--numa-binding`, as `0-3,8`; empty without a binding."""


class RankExited(RankFact, frozen=True, kw_only=True, tag="rank_exited.v1"):
    """A rank's process ended by itself; its agent sends it.

    Ranks that the agent stopped are in its `ranks_stopped`.
    """

    pid: Count
    """Its process id on the node."""
    how: Name
    """`done`, `error` (an exit code), `signal`, `out_of_memory` (killed by the kernel)
    or `unknown` (nobody saw it end)."""
    lasted_s: float
    """From start to exit."""
    exit_code: Int | None = None
    """What it exited with; None when a signal ended it, or when nobody saw it."""
    signal: Name | None = None
    """The signal that ended it: `SIGKILL`."""
    error: ErrorRecord | None = None
    """The exception that ended it, where there was one."""
    first_error: str = ""
    """The first line of its output that reports an error, at most 1 KiB."""
    log: BlobRef | None = None
    """The end of its output."""
    core_dumped: bool = False
    """The kernel wrote a core file."""
    step: Count | None = None
    """The last step that it finished."""
    section: Name | None = None
    """The innermost section that it was in."""
    incident: Name | None = None
    """The incident that it belongs to, where the agent knows it."""


class RankStalled(RankFact, frozen=True, kw_only=True, tag="rank_stalled.v1"):
    """A rank has made no progress past its limit; its agent sends it, from local evidence."""

    waited_s: float
    """Since its last progress, by the node's monotonic clock."""
    limit_s: float
    """The limit that it passed."""
    limit_source: str
    """Where the limit comes from: `learned`, `configured`, `default` or `floor`."""
    phase: Name
    """`start`, `first_step`, `heartbeat`, `step`, `section`, `checkpoint`, `evaluation`, `compile`
    or `exit`."""
    signal: Name = "page"
    """What shows progress: `page` (sections and steps) or `collectives`."""
    section: Name | None = None
    """The innermost section that is open; None when there is none."""
    step: Count | None = None
    """The last step that it finished."""
    pid: Count | None = None
    """Its process id on the node."""
    blocked_in: str = ""
    """Where it waits, if that is known: a frame, a system call, a collective."""
    process_state: str = ""
    """The kernel's letter for it: `S` sleeping, `D` in the kernel, `T` stopped, `R` running."""
    is_fatal: bool = True
    """It ends the round; False in observe mode."""
    limit_name: Name = ""
    """What it is the limit of: a section, or `first-step`, `step`, `outside` or `heartbeat`."""
    limit_origin: Name = ""
    """Where somebody has set it: an option, a setting, `everstep limits`."""


class RankRecovered(RankFact, frozen=True, kw_only=True, tag="rank_recovered.v1"):
    """A stalled rank moves again; its agent sends it. A later stall is a new one."""

    stalled_s: float
    """From its last progress before the stall until the first after it."""
    stall: Name
    """The id of the `rank_stalled` that is over."""
    step: Count | None = None
    """The last step that it finished."""
    section: Name | None = None
    """The innermost section that is open."""


class RanksStopped(RoundFact, frozen=True, kw_only=True, tag="ranks_stopped.v1"):
    """An agent has stopped the ranks of an ended round; it sends it when none is left."""

    node: Name
    """The node."""
    slot: Count
    """Its slot."""
    ranks: tuple[Int, ...]
    """The global ranks that it stopped; those that had exited before are not among them."""
    stop_s: float
    """From the order until the last process of every rank was gone."""
    killed: tuple[Int, ...] = ()
    """Those of them that outlived the grace period and were killed."""
    evidence_s: float = 0.0
    """How long it collected evidence before it stopped them."""
    device_wait_s: float = 0.0
    """How long it then waited for the accelerators' memory to become free."""
    device_held_bytes: Int = 0
    """Accelerator memory that was still held when it stopped waiting."""
    held_by: str = ""
    """The processes that hold it, if that is known."""


class ReportedValue(Part, frozen=True, kw_only=True):
    """A metric that the script reports."""

    name: str
    """As the script calls it: `loss`."""
    value: float
    """Its latest value on the first rank."""


class ProgressMade(RoundFact, frozen=True, kw_only=True, tag="progress_made.v1"):
    """The training made progress.

    Slot 0's agent sends it on the first step of a round, then once a minute while steps
    are made, and with the last.
    """

    step: Count
    """The last step that its first rank finished."""
    node: Name = ""
    """The node that reports it."""
    is_first: bool = False
    """It is the round's first step: the training is back."""
    steps_s: float = 0.0
    """Wall time since the previous such fact of the round, or since the restore."""
    steps: Count = 0
    """Steps made in that time."""
    step_p50_s: float | None = None
    """The median step in that time."""
    step_p99_s: float | None = None
    """The length that 99 of 100 steps in that time did not exceed; of its last 500 steps."""
    step_max_s: float | None = None
    """The longest of these steps."""
    values: tuple[ReportedValue, ...] = ()
    """The latest value of each metric that the script reports; finite ones only."""
    total_steps: Count | None = None
    """The last step of the training, if the script declared it."""
    lost_steps: Count = 0
    """On the first step only: steps made before that had to be made again."""


class WatchChanged(Fact, frozen=True, kw_only=True, tag="watch_changed.v1"):
    """Stall detection on a node was switched on or off; its agent sends it, with the reason."""

    node: Name
    """The node."""
    state: Name
    """`armed`, `learning` (limits are the defaults), `paused` (by the script) or `off`."""
    reason: str
    """Why."""
    until_s: float | None = None
    """How much longer, for a pause with an end."""
    sections: tuple[str, ...] = ()
    """The sections with a limit of their own."""
