"""The [agent] section: the defaults of `everstep run`, which its command line overrides."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal, get_args

from everstep.settings import Settings
from everstep_services.agent.replicas.settings import CheckpointSettings

Kind = Literal[
    "page", "process", "flight_recorder", "nccl_ras", "stacks", "kernel_log", "gpu", "cgroup",
    "environment", "split_sizes",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)


class AgentSettings(Settings, frozen=True, kw_only=True):
    """How an agent runs its ranks, and what it tells about its node."""

    node_id: str | None = None
    """This node's id; by default the scheduler's name for it, else the host name."""
    address: str | None = None
    """Where other nodes reach this one; by default the address that reaches the bus."""
    domain: str = ""
    """This node's failure domain: its rack, its power unit."""
    topology: str = ""
    """Where this node sits in the network, outermost first: `block-3/rack-12`."""
    group: str = ""
    """The nodes that are replaced together with this one, in a job with `--group-size`: a name,
    `@nvlink` (its NVLink domain) or `@array` (its task of a Slurm array); by default its domain,
    else its topology.
    """
    infra_rank: int | None = None
    """This node's place; by default the one that the scheduler gives."""
    allocation_dir: Path | None = None
    """A folder that all nodes of a scheduler's allocation share. Each agent writes there how it
    ended, and leaves, as at a preemption, once the batch script asks for its node there. Scripts of
    `everstep slurm sbatch` set it.
    """
    log_dir: Path | None = None
    """Where the output of ranks is kept; by default `logs` in the state directory."""
    console: str = "all"
    """Whose output is shown: `all`, `none`, or global ranks with commas."""
    prefix: bool = True
    """Begin each shown line with its node and rank."""
    warm: bool = True
    """Keep a process (the forge) that has imported torch, and fork ranks from it."""
    numa_binding: Literal["off", "node", "socket", "exclusive", "core-complex"] = "off"
    """The CPUs that a rank may use: all of the NUMA node of its GPU, all of the GPU's socket, an
    equal part of the node's cores, or the cores that share a cache; without GPUs, the NUMA nodes
    are spread over the ranks. Memory is taken near these CPUs first.
    """
    leave_children: bool = False
    """Processes that ranks have started, and that still run when all ranks have exited with 0, live
    on. By default they are killed, and named.
    """
    preload: str = "auto"
    """The modules that the forge imports besides torch: `auto` (those that the script imports),
    `none`, or modules with commas.
    """
    max_restarts: int | None = 10
    """How many restarts a job may have in all; `none` for no limit."""
    max_restarts_per_hour: int | None = None
    """How many restarts a job may have within an hour; by default there is no limit within an hour.
    """
    no_progress_limit: int | None = 3
    """Rounds in a row that may end without a new step, before a stop is advised; `none` for no
    limit. Given on the command line, it stops the job.
    """
    stop_on_repeat: bool = False
    """Stop a job that fails twice in the same way or makes no progress, instead of only advising
    it."""
    stop_grace_s: float = 3.0
    """From SIGTERM to SIGKILL in a broken round: there is nothing left to save."""
    preempt_grace_s: float = 600.0
    """From a notice that this node will be taken away to SIGKILL: time to save."""
    agree_within_s: float = 2.0
    """How long, after that notice, ranks wait for rendezvous if it does not answer; at most half of
    `preempt_grace_s`. Then the ranks of each node stop after a step of their own.
    """
    unheard_within_s: float = 600.0
    """How long an agent waits for a silent control plane once its ranks have ended, or one has
    failed. Then it exits: with 0 if a job of one node has succeeded, otherwise with 94. Facts stay
    in the spool.
    """
    preempt_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    """The signals to `everstep run` that mean that this node will be taken away: any of these
    three.
    """
    network_test: Literal["off", "first", "failures"] = "off"
    """When a round waits until its nodes have measured the network in pairs: never, the `first`
    round of an allocation, or also each round after a failure that is not one of the program.
    """
    restart_on_stall: bool = True
    """A stalled rank ends the round; otherwise it is only reported."""
    limits: tuple[str, ...] = ()
    """How long a rank may go without progress, each as `NAME=SECONDS`: in a section, or in
    `first-step`, `step`, `heartbeat` or `outside`. They override learned limits.
    """
    warmup_steps: int | None = None
    """The number of first steps of a round that may take as long as the first; None for the number
    that the script gives, otherwise 1.
    """
    first_step_limit_s: float = 7200.0
    """The limit up to the end of the first step of a round, or from heartbeat to heartbeat, until
    it
    is learned.
    """
    section_limit_s: float = 1800.0
    """The limit in a section and outside of all, until it is learned."""
    checkpoint_limit_s: float = 7200.0
    """The limit in a section for checkpoints, until it is learned."""
    evaluation_limit_s: float = 7200.0
    """The limit in a section for evaluation, until it is learned."""
    step_limit_s: float = 7200.0
    """The limit from one step to the next, whatever sections come and go between."""
    idle_compile_s: float = 300.0
    """A compilation has hung if the rank and its child processes use less than 2 % of a core for
    this
    long, and for three times the limit that holds otherwise.
    """
    interpreter_within_s: float = 0.5
    """How long the report of a stall waits for the rank's interpreter; without an answer, only the
    kernel's view is reported.
    """
    timings: bool = True
    """Send straggler where the time of ranks goes, once a window; without, no slow rank of this
    node
    is found. `everstep control set straggler.timings=off` switches it for a running job.
    """
    store_logs: bool = False
    """Send the output of ranks to the log store, too, so that `everstep logs` has all of it on any
    machine, for `bus.logs_days`. What looks like a secret is masked.
    """
    store_logs_bytes_per_s: int = 4 << 20
    """The most bytes of output that this node sends in a second. Nothing is dropped: the files on
    the node are the queue.
    """
    evidence_without: tuple[str, ...] = ()
    """Kinds of evidence that are not collected: any of `page`, `process`, `flight_recorder`,
    `stacks`, `kernel_log`, `gpu`, `cgroup` and `environment`.
    """
    native_stacks: bool = False
    """Read C++ frames, too, before ranks are stopped: a rank stands still for that, some 0.1 s to
    1 s. Evidence of ranks that continue to run has none.
    """
    scheduler_grace_s: float | None = None
    """How long the scheduler waits from its signal to its kill; only compared with other limits."""
    join_within_s: float | None = None
    """How long a round may take to form; by default the setting of rendezvous."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """The settings of states in memory."""

    def __post_init__(self) -> None:
        self._above_zero(
            "unheard_within_s first_step_limit_s section_limit_s checkpoint_limit_s "
            "evaluation_limit_s step_limit_s idle_compile_s interpreter_within_s join_within_s "
            "scheduler_grace_s",
            below=1e9,
        )
        self._not_negative(
            "stop_grace_s preempt_grace_s agree_within_s max_restarts max_restarts_per_hour "
            "infra_rank",
            below=1e7,
        )
        _check_words("preempt_signals", self.preempt_signals, _NOTICES)
        _check_words("evidence_without", self.evidence_without, KINDS)
        self._at_least(1, "warmup_steps no_progress_limit")
        self._at_least(1024, "store_logs_bytes_per_s")


def _check_words(name: str, words: Iterable[str], allowed: Collection[str]) -> None:
    unknown = sorted(set(words) - set(allowed))
    if unknown:
        raise ValueError(f"{name} may be {', '.join(sorted(allowed))}, got {', '.join(unknown)}")


_NOTICES = frozenset({"SIGTERM", "SIGUSR1", "SIGUSR2"})
