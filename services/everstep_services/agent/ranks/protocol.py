"""What is asked of a keeper, and what it says."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from everstep.errors import EverstepError
from everstep_services.agent.core.exit import MemoryKill
from everstep_services.agent.ranks.device_memory import HeldMemory
from trainer_sdk.page import PageView
from trainer_sdk.wire import RankCommand, SessionMessage

Preload = tuple[str, ...] | Literal["auto"]
StartKind = Literal["warm", "cold"]


class WardenLostError(EverstepError):
    """The warden is gone, and with it every rank of the node."""


class StartRefusedError(EverstepError):
    """The node could not prepare what its ranks need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What stays the same for all rounds of one agent."""

    instance: str
    """Tells this agent's processes from those of all others, also of this node's next agent."""
    runtime_dir: Path
    """The agent's own, 0700; best in /dev/shm, never on a network file system."""
    command: RankCommand
    cwd: Path
    python: str
    """The interpreter of the ranks."""
    environ: dict[str, str] = field(repr=False)
    """What the ranks' environments have in common; the forge starts with it."""
    warm: bool = True
    preload: Preload = "auto"
    leaves: bool = False
    """What ranks have started may live on when all of them have exited with 0."""
    own: tuple[str, ...] = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    """Variables that each rank has for itself, or each round: what reads them at its import is
    not imported by the forge."""
    address: str = ""
    """Where other nodes reach this one, and may ask whether the warden lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank to start."""

    rank: int
    environ: dict[str, str] = field(repr=False)
    """All of it, `RANK` and its like included; the keeper adds its own `EVERSTEP_…`."""
    runtime_dir: Path
    """The rank's own in this round; made if it is missing."""
    stdout: Path
    stderr: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The ranks of one round."""

    round: int
    ranks: tuple[RankPlan, ...]
    warm: bool = True
    forge_within_s: float = 60.0
    """How long they wait for a forge that is still importing; then they start cold."""


@dataclass(frozen=True, slots=True)
class RankRuns:
    """A rank is about to run the user's script."""

    round: int
    rank: int
    pid: int
    start: StartKind
    start_s: float
    """Since `start` was called."""


@dataclass(frozen=True, slots=True)
class RankStepped:
    """A rank has finished its first step of the round."""

    round: int
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class ScriptEnded:
    """The script of a rank is over; its process may still be leaving, or hang while it does."""

    round: int
    rank: int
    code: int
    has_error: bool
    was_told: bool = False
    """It may be over because its process was told to end."""


@dataclass(frozen=True, slots=True)
class RankSaid:
    """The script of a rank says something by its session."""

    round: int
    rank: int
    said: SessionMessage


@dataclass(frozen=True, slots=True)
class RankGone:
    """The process of a rank has ended, by itself or because it was stopped."""

    round: int
    rank: int
    pid: int
    code: int | None
    signal: str | None
    """`SIGKILL`."""
    core_dumped: bool
    lasted_s: float
    memory: MemoryKill = ""
    was_told: bool = False
    """It may have ended because it was told to."""


@dataclass(frozen=True, slots=True)
class ForgeReady:
    """The next ranks start warm."""

    took_s: float
    preloaded: tuple[str, ...]
    failed: tuple[str, ...]
    """Asked for, but not importable; each with the reason."""
    left_out: tuple[str, ...] = ()
    """Why something is imported by each rank for itself."""


@dataclass(frozen=True, slots=True)
class ForgeUnfit:
    """The next ranks start cold, unless another forge gets ready before."""

    reason: str
    is_final: bool
    """No other is tried."""


@dataclass(frozen=True, slots=True)
class StartRefused:
    """The node could not make a process; `stop` ends those that it could."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class WardenLost:
    """The warden is gone. Everything that it had started has been killed; open another keeper."""

    reason: str


WardenEvent = (
    RankRuns
    | RankStepped
    | ScriptEnded
    | RankSaid
    | RankGone
    | ForgeReady
    | ForgeUnfit
    | StartRefused
    | WardenLost
)


@dataclass(frozen=True, slots=True)
class RankSeen:
    """A rank of the present round, as it can be looked at from outside."""

    rank: int
    pid: int
    """Its process; 0 when there is none, or it is gone."""
    page: PageView
    folder: Path
    """Its own in this round, where its sockets are."""
    is_gone: bool = False
    """It was there, and has ended."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """Nothing of the round is left."""

    ranks: tuple[int, ...]
    """Those that had not ended by themselves."""
    killed: tuple[int, ...]
    """Those of them that outlived the grace."""
    swept: int
    """Other processes that the ranks had left behind."""
    left: tuple[int, ...]
    """Process ids that outlived even SIGKILL: the kernel holds them, a device may still, too."""
    stop_s: float
    outlived: tuple[str, ...] = ()
    """What was still there though all ranks had exited with 0: process id and command."""
    devices: HeldMemory = field(default_factory=HeldMemory)
    """Accelerator memory that the ranks seem to hold all the same."""
