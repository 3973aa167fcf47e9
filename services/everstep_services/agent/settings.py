"""The [agent] section: what `everstep run` does unless its command line says otherwise."""

from pathlib import Path

from everstep.settings import Settings


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
    """From SIGTERM to SIGKILL when this process is asked to end: time to save."""
    join_within_s: float | None = None
    """How long a round may take to form; by default what rendezvous is set to."""

    def __post_init__(self) -> None:
        for name in ("stop_grace_s", "preempt_grace_s"):
            if not 0 <= getattr(self, name) < 1e7:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name):g}")
        if self.join_within_s is not None and not 0 < self.join_within_s < 1e9:
            raise ValueError(f"join_within_s must be above 0, got {self.join_within_s:g}")
        for name in ("max_restarts", "max_restarts_per_hour", "infra_rank"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if self.no_progress_limit is not None and self.no_progress_limit < 1:
            raise ValueError(f"no_progress_limit must be 1 or more, got {self.no_progress_limit}")
