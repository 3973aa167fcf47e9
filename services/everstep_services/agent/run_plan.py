"""The plan of one `everstep run`: settled before anything starts, and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path
from typing import Literal

from everstep.bus.settings import BusSettings
from everstep.messages.facts.jobs import JobSpec
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.ranks.cpu_affinity import CpuBinding
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import LimitRules


class Std(IntFlag):
    """Standard streams, numbered as torchrun's `-r` and `-t` do."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """The streams of local ranks: one choice for all, or one for each rank that is named."""

    default: Std = Std.NONE
    by_local_rank: Mapping[int, Std] = field(default_factory=dict)

    def of(self, local_rank: int) -> Std:
        """The streams of this local rank."""
        return self.by_local_rank.get(local_rank, self.default)


@dataclass(frozen=True, slots=True)
class ConsoleChoice:
    """Which output of the ranks is shown; all of it is kept in files in any case."""

    ranks: frozenset[int] | None = None
    """These global ranks; None for all."""
    local_ranks: frozenset[int] | None = None
    """And of them these local ranks; None for all."""
    redirects: StreamChoice = field(default_factory=StreamChoice)
    """Streams that go to their files only."""
    tee: StreamChoice = field(default_factory=StreamChoice)
    """Streams that are shown although `redirects` names them."""
    prefix: str | None = "${node}:${rank}| "
    """Before each line; `${node}`, `${rank}`, `${local_rank}`, `${role_name}`. None for none."""

    is_colored: bool = True
    """Prefixes may have a colour, where a terminal shows it."""

    def shows(self, rank: int, local_rank: int) -> Std:
        """The streams of this rank that a person sees."""
        if self.ranks is not None and rank not in self.ranks:
            return Std.NONE
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return Std.NONE
        return (Std.ALL & ~self.redirects.of(local_rank)) | self.tee.of(local_rank)


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """What each rank runs. Not masked: it may hold secrets, so it is never recorded or logged."""

    kind: Literal["script", "module", "program"]
    target: str
    """The script's path, the module's name, or the program."""
    arguments: tuple[str, ...] = ()
    python: str = ""
    """The interpreter for scripts and modules."""

    def argv(self, local_rank: int) -> tuple[str, ...]:
        """`sys.argv` of a rank, as torchrun makes it: `${local_rank}` is filled in."""
        filled = (word.replace("${local_rank}", str(local_rank)) for word in self.arguments)
        return (self.target, *filled)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The scheduler that started this agent, according to the environment."""

    name: str = "none"
    """`slurm`, `kubernetes`, or `none` (a person)."""
    job: str = ""
    """The scheduler's own id of it."""
    attempt: int = 0
    """How often it had been requeued before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """The part of its plan that each agent has, however its ranks are started."""

    job: str
    node: str
    spec: JobSpec
    """The job as published: secrets in its command are masked."""
    allocation: str
    scheduler: Scheduler = field(default_factory=Scheduler)
    address: str
    """Where other nodes reach this one."""
    agent: AgentSettings = field(default_factory=AgentSettings)
    """The section of this name, with the options of the command line in it."""
    checks: ChecksSettings = field(default_factory=ChecksSettings)
    """How this node is examined."""
    limits: LimitRules = field(default_factory=LimitRules)
    """How long a rank may go without progress."""
    traces_url: str = ""
    """Where the spans of this agent go: a collector of OpenTelemetry. Empty sends none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(AgentPlan):
    """Everything that `everstep run` was asked for, with every default filled in."""

    command: ScriptCommand
    bus: BusSettings | None
    """The bus; None for that of a running `everstep up`, or, with `standalone`, for our own."""
    state_dir: Path
    log_dir: Path
    console: ConsoleChoice
    infra_rank: int | None = None
    domain: str = ""
    topology: tuple[str, ...] = ()
    group: str = ""
    """The nodes that are replaced together with this one; empty in a job without such groups."""
    role: str = "default"
    run_id: str = ""
    """TORCHELASTIC_RUN_ID: `--rdzv-id` as given, else the job."""
    warm: bool = True
    preload: tuple[str, ...] | Literal["auto"] = "auto"
    """Modules that the forge imports besides torch."""
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    """TORCHELASTIC_SIGNALS_TO_HANDLE, for scripts that read it; the agent always handles these,
    SIGUSR1 and SIGUSR2."""
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    """How states are kept in the memory of nodes."""
    virtual_local_rank: bool = False
    """Each rank sees one device, as its number 0."""
    cpu_bindings: tuple[CpuBinding, ...] = ()
    """The CPUs of each local rank; empty for no binding."""
    standalone: bool = False
    """Bus and services run in this process."""
    leave_children: bool = False
    """Processes that ranks have started may outlive a job that is done."""
    allow_fresh_start: bool = False
    """A training may begin from scratch if none of its checkpoints can be used."""
    stand_in: Literal["", "missing", "always"] = ""
    """Whether ranks find Everstep's modules under NVRx's name: never, where NVRx is missing, or
    always.
    """
    allow_injection: bool = False
    """Faults may be injected by anybody who may give orders to this job's agents."""
    notes: tuple[str, ...] = ()
    """What a person should read before it starts: one line each."""

    @property
    def ranks_per_node(self) -> int:
        """Processes on this node."""
        return self.spec.ranks_per_node
