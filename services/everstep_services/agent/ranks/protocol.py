"""The plans and events that pass between an agent and the client of its warden."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from everstep.errors import EverstepError
from everstep_services.agent.core.exit import MemoryKill
from trainer_sdk.page import PageView
from trainer_sdk.wire import ForgeDown, ForgeUp, RankCommand, SessionMessage, StartFailed, Stepped

Preload = tuple[str, ...] | Literal["auto"]
StartKind = Literal["warm", "cold", "kept"]


class WardenLostError(EverstepError):
    """The warden is gone, and with it every rank of the node."""


class StartRefusedError(EverstepError):
    """The node could not prepare the start of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The settings of the ranks that stay the same for all rounds of one agent."""

    instance: str
    """Marks this agent's processes, to tell them from those of any other agent of the node."""
    runtime_dir: Path
    """The agent's own folder, 0700; best in /dev/shm, never on a network file system."""
    command: RankCommand
    cwd: Path
    python: str
    """The interpreter of the ranks."""
    environ: dict[str, str] = field(repr=False)
    """The variables that all ranks share; the forge starts with them."""
    warm: bool = True
    preload: Preload = "auto"
    leaves: bool = False
    """Processes that ranks have started may live on when all ranks have exited with 0."""
    own: tuple[str, ...] = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    """Variables that differ between ranks or rounds: the forge does not import modules that read
    them at import.
    """
    address: str = ""
    """Where other nodes reach this one, and may ask whether the warden lives."""


def rank_folder(runtime_dir: Path, round: int, rank: int) -> Path:
    """The folder of a rank in this round, with its page and its sockets."""
    return runtime_dir / f"r{round}" / str(rank)


@dataclass(frozen=True, slots=True)
class RankRuns:
    """A rank is about to run the user's script."""

    round: int
    rank: int
    pid: int
    start: StartKind
    start_s: float
    """Seconds since `start` was called."""


@dataclass(frozen=True, slots=True)
class ScriptEnded:
    """The script of a rank is over; its process may still be exiting, or hang while it does."""

    round: int
    rank: int
    code: int
    was_told: bool = False
    """It may be over because its process was ordered to end."""


@dataclass(frozen=True, slots=True)
class RankSaid:
    """The script of a rank has sent a message through its session."""

    round: int
    rank: int
    message: SessionMessage


@dataclass(frozen=True, slots=True)
class RankGone:
    """The process of a rank has ended, by itself or because it was stopped."""

    round: int
    rank: int
    pid: int
    code: int | None
    signal: str | None
    """As `SIGKILL`."""
    core_dumped: bool
    lasted_s: float
    memory: MemoryKill = ""
    was_told: bool = False
    """It may have ended because it was ordered to."""


@dataclass(frozen=True, slots=True)
class WardenLost:
    """The warden is gone, and all that it had started is killed; open another client."""

    reason: str


WardenEvent = (
    RankRuns | Stepped | ScriptEnded | RankSaid | RankGone | ForgeUp | ForgeDown | StartFailed
    | WardenLost
)  # fmt: skip
"""Lines that are events as they are, and the events that the client makes of the others."""


@dataclass(frozen=True, slots=True)
class RankSeen:
    """A rank of the present round, as others may look at it from outside."""

    rank: int
    pid: int
    """Its process id; 0 if there is none, or it is gone."""
    page: PageView
    folder: Path
    """Its own folder in this round, with its sockets."""
    is_gone: bool = False
    """Its process existed, and has ended."""
