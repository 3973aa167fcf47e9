"""The processes of a round: started, stalled, exited, and their progress."""

from collections.abc import Sequence

from everstep.messages.base import BlobRef, Count, Fact, Int, Name, Part, RoundFact, Time

_NAMED_MOST = 8


class ErrorRecord(Part, frozen=True, kw_only=True):
    """The exception that ended a rank, recorded inside the rank, without a decorator."""

    name: str
    """The class of the exception, with its module: `torch.OutOfMemoryError`."""
    text: str
    """The message of the exception, at most 4 KiB."""
    traceback: str = ""
    """The traceback, at most 64 KiB; the innermost frames are kept."""
    place: str = ""
    """The innermost frame of the user's own code: `train.py:88 in step`."""
    at: Time | None = None
    """When the exception was raised, by the node's clock."""
    chain: tuple[str, ...] = ()
    """The classes of the exceptions that led to this one, outermost first."""
    asks: Name = ""
    """What the script asks for by its exit code: `move` (16: the ranks are to start again on other
    nodes) or `stop` (17: a result is wrong, and a restart does not help). Set only where numerics
    or Megatron's re-run machine is loaded: the codes of any other script mean nothing."""


class RankFact(RoundFact, frozen=True, kw_only=True):
    """A fact about one rank of one round."""

    node: Name
    """The node on which the rank runs."""
    slot: Count
    """The slot of that node."""
    rank: Count
    """The rank's number in the world."""
    local_rank: Count
    """The rank's number on its node."""


class RankStarted(RankFact, frozen=True, kw_only=True, tag="rank_started.v1"):
    """A rank's process runs; the node's agent sends this."""

    pid: Count
    """The process id of the rank on its node."""
    start: str
    """`warm` (forked from a process that has imported the modules), `cold`, `kept` (it goes on from
    an earlier round), or `attached` (started by another launcher)."""
    start_s: float
    """The time from the order until the rank ran the user's script."""
    device: Name = ""
    """The id of the rank's accelerator: `GPU-5e9c…`; empty on a CPU."""
    log: str = ""
    """The path of the rank's output on its node."""
    role: Name = ""
    """The rank's role group, for scripts whose ranks do different work."""
    cpus: str = ""
    """The CPUs that `--numa-binding` gave to the rank, as `0-3,8`; empty without a binding."""


class StateHealed(RankFact, frozen=True, kw_only=True, tag="state_healed.v1"):
    """A rank has its state in a round into which ranks have gone on with theirs.

    The rank's agent sends it for each rank whose state came from elsewhere, and for rank 0, which
    tells about all ranks.
    """

    origin: Name
    """Where the rank's state comes from: `own` (its own memory), `rank` (another rank), `image`
    (the newest saved state that all ranks could have) or `fresh` (nowhere)."""
    took_s: float
    """From the group of the round until all ranks had their states."""
    step: Count | None = None
    """The step from which all ranks go on; None where none has a state."""
    donor: Count | None = None
    """The other rank, for `rank`."""
    size_bytes: Count = 0
    """How much the rank has received."""
    kept: Count = 0
    """Of rank 0, like all below: how many ranks have kept the state in their memory."""
    taken: Count = 0
    """How many ranks went on in their processes, and took their state from others."""
    replaced: Count = 0
    """How many ranks have another process."""
    replaced_ranks: tuple[Int, ...] = ()
    """These ranks, at most 100."""
    reason: str = ""
    """Why this step and these origins."""

    @property
    def sentence(self) -> str:
        """What became of all ranks; of the fact of rank 0."""
        parts = []
        if self.replaced:
            verb = "was" if self.replaced == 1 else "were"
            parts.append(f"{ranks_in_words(self.replaced_ranks, self.replaced)} {verb} replaced")
        if self.origin == "image":
            parts.append(f"all went back to step {self.step}")
        elif self.origin == "fresh":
            parts.append("all began anew")
        else:
            parts.append(f"{self.kept} kept {'its' if self.kept == 1 else 'their'} state")
            if self.taken:
                parts.append(f"{self.taken} took it from others")
        return ", ".join(parts)


def ranks_in_words(ranks: Sequence[int], count: int) -> str:
    """These ranks, in ascending order; there may be more: `rank 5`, `ranks 8 to 15`, `64 ranks`."""
    if len(ranks) < count or not ranks:
        return f"{count} ranks"
    first, *others, last = (ranks[0], *ranks)
    if not others:
        return f"rank {first}"
    if len(others) > 1 and last - first == count - 1:
        return f"ranks {first} to {last}"
    if count > _NAMED_MOST:
        return f"{count} ranks"
    return f"ranks {', '.join(map(str, others))} and {last}"


class RankExited(RankFact, frozen=True, kw_only=True, tag="rank_exited.v1"):
    """A rank's process ended by itself; the node's agent sends this.

    Ranks that the agent stopped are in the agent's `ranks_stopped`.
    """

    pid: Count
    """The process id of the rank on its node."""
    how: Name
    """`done`, `error` (an exit code), `signal`, `out_of_memory` (killed by the kernel) or `unknown`
    (nobody saw the end)."""
    lasted_s: float
    """The time from the start of the process to its exit."""
    exit_code: Int | None = None
    """The exit code; None when a signal ended the process, or when nobody saw the end."""
    signal: Name | None = None
    """The signal that ended the process: `SIGKILL`."""
    error: ErrorRecord | None = None
    """The exception that ended the rank, where there was one."""
    first_error: str = ""
    """The first line of the rank's output that reports an error, at most 1 KiB."""
    log: BlobRef | None = None
    """The end of the rank's output."""
    core_dumped: bool = False
    """The kernel wrote a core file."""
    step: Count | None = None
    """The last step that the rank finished."""
    section: Name | None = None
    """The innermost section in which the rank was."""
    incident: Name | None = None
    """The incident that the exit belongs to, where the agent knows it."""
    is_pid_of_host: bool = False
    """The kernel's log has the same id for the process: the agent is not in a container with its
    own process ids."""


class RankStalled(RankFact, frozen=True, kw_only=True, tag="rank_stalled.v1"):
    """A rank has made no progress past its limit; the node's agent sends this."""

    waited_s: float
    """The time since the rank's last progress, by the node's monotonic clock."""
    limit_s: float
    """The limit that was passed."""
    limit_source: str
    """Where the limit comes from: `learned`, `configured`, `default` or `floor`."""
    phase: Name
    """`start`, `first_step`, `heartbeat`, `step`, `section`, `checkpoint`, `evaluation`, `compile`
    or `exit`."""
    signal: Name = "page"
    """What shows progress: `page` (sections and steps), `collectives`, or `monitor`: that of an
    in-process restart, which ends the rank."""
    section: Name | None = None
    """The innermost section that is open; None when there is none."""
    step: Count | None = None
    """The last step that the rank finished."""
    pid: Count | None = None
    """The process id of the rank on its node."""
    blocked_in: str = ""
    """Where the rank waits, if that is known: a frame, a system call, a collective."""
    process_state: str = ""
    """The kernel's letter for the process: `S` sleeping, `D` in the kernel, `T` stopped, `R`
    running."""
    is_fatal: bool = True
    """The stall ends the round; False in observe mode."""
    limit_name: Name = ""
    """What the limit is for: a section, or `first-step`, `step`, `outside` or `heartbeat`."""
    limit_origin: Name = ""
    """Where somebody has set the limit: an option, a setting, `everstep limits`."""
    is_waiting_for_ranks: bool | None = None
    """The rank waits for other ranks; None where nothing shows whether it does."""


class RankRecovered(RankFact, frozen=True, kw_only=True, tag="rank_recovered.v1"):
    """A stalled rank makes progress again; the node's agent sends this.

    A later stall of the same rank is a new stall.
    """

    stalled_s: float
    """The time from the last progress before the stall until the first after it."""
    stall: Name
    """The id of the `rank_stalled` that is over."""
    step: Count | None = None
    """The last step that the rank finished."""
    section: Name | None = None
    """The innermost section that is open in the rank."""


class RanksStopped(RoundFact, frozen=True, kw_only=True, tag="ranks_stopped.v1"):
    """An agent has stopped the ranks of an ended round, and no process of them is left."""

    node: Name
    """The node."""
    slot: Count
    """The slot of that node."""
    ranks: tuple[Int, ...]
    """The global ranks that the agent stopped, without those that had exited before, and without
    those that it keeps for the next round."""
    stop_s: float
    """The time from the order until the last process of every rank was gone."""
    killed: tuple[Int, ...] = ()
    """The stopped ranks that outlived the grace period and were killed."""
    evidence_s: float = 0.0
    """How long the agent collected evidence before it stopped the ranks."""
    device_wait_s: float = 0.0
    """How long the agent then waited for the accelerators' memory to become free."""
    device_held_bytes: Int = 0
    """Accelerator memory that was still in use when the agent stopped waiting."""
    held_by: str = ""
    """The processes that use that memory, if they are known."""


class ReportedValue(Part, frozen=True, kw_only=True):
    """A metric that the script reports."""

    name: str
    """The name that the script gives to the metric: `loss`."""
    value: float
    """The latest value on the first rank."""


class ProgressMade(RoundFact, frozen=True, kw_only=True, tag="progress_made.v1"):
    """The training made progress.

    Slot 0's agent sends it on the first step of a round, then once a minute while steps
    are made, and with the last.
    """

    step: Count
    """The last step that the first rank of slot 0 finished."""
    node: Name = ""
    """The node that reports it."""
    is_first: bool = False
    """This is the round's first step: the training is back."""
    steps_s: float = 0.0
    """The wall time since the previous such fact of the round, or since the restore."""
    steps: Count = 0
    """The number of steps in that time."""
    step_p50_s: float | None = None
    """The median duration of a step in that time."""
    step_p99_s: float | None = None
    """The duration that 99 of 100 steps in that time did not exceed; of its last 500 steps."""
    step_max_s: float | None = None
    """The duration of the longest of these steps."""
    values: tuple[ReportedValue, ...] = ()
    """The latest value of each metric that the script reports; only finite values."""
    total_steps: Count | None = None
    """The last step of the training, if the script declared it."""
    is_counted_anew: bool = False
    """The script does not number its steps: they are counted from 1 in each round."""
    lost_steps: Count = 0
    """With the first step only: how many steps had to be made a second time."""


class WatchChanged(Fact, frozen=True, kw_only=True, tag="watch_changed.v1"):
    """Stall detection on a node was switched on or off; its agent sends it, with the reason."""

    node: Name
    """The node."""
    state: Name
    """`armed`, `learning` (limits are the defaults), `paused` (by the script) or `off`."""
    reason: str
    """Why."""
    until_s: float | None = None
    """How much longer a pause lasts, if it has an end."""
    sections: tuple[str, ...] = ()
    """The sections with a limit of their own."""
