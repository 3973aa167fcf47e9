"""The [agent] section: what `everstep run` does unless its command line says otherwise."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal, get_args

from everstep.settings import Settings
from everstep_services.agent.replicas.settings import CheckpointSettings

Kind = Literal[
    "page", "process", "flight_recorder", "stacks", "kernel_log", "gpu", "cgroup", "environment"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


class AgentSettings(Settings, frozen=True, kw_only=True):
    """How an agent runs its ranks, and what it tells about its node."""

    node_id: str | None = None
    """This node's id; by default the scheduler's name for it, else the host name."""
    address: str | None = None
    """Where other nodes reach this one; by default the address that reaches the bus."""
    domain: str = ""
    """What fails together with this node: a rack, a power unit."""
    topology: str = ""
    """Where this node sits in the network, outermost first: `block-3/rack-12`."""
    infra_rank: int | None = None
    """This node's place; by default what the scheduler says."""
    log_dir: Path | None = None
    """Where the output of ranks is kept; by default `logs` in the state directory."""
    console: str = "all"
    """Whose output is shown: `all`, `none`, or global ranks with commas."""
    prefix: bool = True
    """Begin each line that is shown with its node and rank."""
    warm: bool = True
    """Keep a process that has imported torch, and fork ranks from it."""
    leave_children: bool = False
    """What ranks have started, and is still there when all of them have exited with 0, lives on. By
    default it is killed, and named."""
    preload: str = "auto"
    """What it imports besides torch: `auto` (what the script imports), `none`, or modules
    with commas."""
    max_restarts: int | None = 10
    """How many restarts a job may have in all; None for no limit."""
    max_restarts_per_hour: int | None = None
    """How many of them within an hour; None for no limit of its own."""
    no_progress_limit: int | None = 3
    """Rounds in a row that may end without a new step, before it is advised to stop; None for no
    limit. Given on the command line, it stops the job."""
    stop_on_repeat: bool = False
    """Stop a job that fails twice in the same way or makes no progress, instead of only advising
    it."""
    stop_grace_s: float = 3.0
    """From SIGTERM to SIGKILL in a round that is broken: there is nothing left to save."""
    preempt_grace_s: float = 600.0
    """From a notice that this node is about to be taken away to SIGKILL: time to save."""
    agree_within_s: float = 2.0
    """How long, after that notice, ranks wait for a rendezvous that does not answer; at most half
    of the grace. Then they stop after a step of their own."""
    unheard_within_s: float = 600.0
    """How long an agent whose ranks have ended, or of which one has failed, waits for a control
    plane that does not answer. Then it exits: with 0 where a job of one node has succeeded, else
    with 94. Facts stay in the spool."""
    preempt_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    """The signals to `everstep run` that are such a notice; of these three any."""
    restart_on_stall: bool = True
    """A rank that has stalled ends the round; else it is only said."""
    limits: tuple[str, ...] = ()
    """How long a rank may go without progress, each as `NAME=SECONDS`: in a section, or in
    `first-step`, `step`, `heartbeat` or `outside`. They win over what is learned."""
    warmup_steps: int | None = None
    """So many first steps of a round may take as long as the first; None for what the script says,
    else 1."""
    first_step_limit_s: float = 7200.0
    """Up to the end of the first step of a round, or from heartbeat to heartbeat, until it is
    learned."""
    section_limit_s: float = 1800.0
    """In a section and outside of all, until it is learned."""
    checkpoint_limit_s: float = 7200.0
    """In a section for checkpoints, until it is learned."""
    evaluation_limit_s: float = 7200.0
    """In a section for evaluation, until it is learned."""
    step_limit_s: float = 7200.0
    """From one step to the next, whatever sections come and go between."""
    idle_compile_s: float = 300.0
    """A compilation has hung if the rank and all that it has started use less than 2 % of a core
    for so long, and for three times the limit of where it is."""
    interpreter_within_s: float = 0.5
    """How long word of a stall waits for what the rank's interpreter does; without, the kernel's
    words stand alone."""
    timings: bool = True
    """Tell straggler where the time of ranks goes, once a window; else no slow rank of this node is
    found. For a job that runs, `everstep control set straggler.timings=off` switches it."""
    evidence_without: tuple[str, ...] = ()
    """Kinds of evidence that are not collected: of `page`, `process`, `flight_recorder`, `stacks`,
    `kernel_log`, `gpu`, `cgroup` and `environment` any."""
    native_stacks: bool = False
    """Read C++ frames, too, before ranks are stopped: a rank stands still for that, some 0.1 s to
    1 s. A capture of ranks that go on has none."""
    scheduler_grace_s: float | None = None
    """How long the scheduler waits from its signal to its kill; only compared with others."""
    join_within_s: float | None = None
    """How long a round may take to form; by default what rendezvous is set to."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """States in memory."""

    def __post_init__(self) -> None:
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ValueError(f"{name} must be above 0, got {value:g}")
        for name in _ZERO_OR_MORE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e7:
                raise ValueError(f"{name} must be 0 or more, got {value:g}")
        _check_words("preempt_signals", self.preempt_signals, _NOTICES)
        _check_words("evidence_without", self.evidence_without, KINDS)
        if self.warmup_steps is not None and self.warmup_steps < 1:
            raise ValueError(f"warmup_steps must be 1 or more, got {self.warmup_steps}")
        if self.no_progress_limit is not None and self.no_progress_limit < 1:
            raise ValueError(f"no_progress_limit must be 1 or more, got {self.no_progress_limit}")


def _check_words(name: str, words: Iterable[str], allowed: Collection[str]) -> None:
    unknown = sorted(set(words) - set(allowed))
    if unknown:
        raise ValueError(f"{name} may be {', '.join(sorted(allowed))}, got {', '.join(unknown)}")


_NOTICES = frozenset({"SIGTERM", "SIGUSR1", "SIGUSR2"})
_ABOVE_ZERO = (
    "unheard_within_s",
    "first_step_limit_s",
    "section_limit_s",
    "checkpoint_limit_s",
    "evaluation_limit_s",
    "step_limit_s",
    "idle_compile_s",
    "interpreter_within_s",
    "join_within_s",
    "scheduler_grace_s",
)
_ZERO_OR_MORE = (
    "stop_grace_s",
    "preempt_grace_s",
    "agree_within_s",
    "max_restarts",
    "max_restarts_per_hour",
    "infra_rank",
)
