"""What crosses between a node's processes: agent, warden, forge and ranks; JSON, one a line."""

import os
import socket
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

import msgspec


class WireLine(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, omit_defaults=True):
    """What every one of them shares: its name is in `type`."""


# From a rank to its agent, as one datagram. A rank writes them by hand: see bootstrap/link.py.


class Up(WireLine, frozen=True, kw_only=True):
    """A rank is about to run the user's script."""

    round: int
    rank: int
    pid: int


class Stepped(WireLine, frozen=True, kw_only=True):
    """A rank has finished its first step of the round."""

    round: int
    rank: int
    step: int


class ScriptFinished(WireLine, frozen=True, kw_only=True, tag="ended"):
    """The script is over; the process still has to leave."""

    round: int
    rank: int
    code: int
    """What the process will exit with, as far as the script decides it."""
    error: bool = False
    """`error.json` has the exception."""


class Paused(WireLine, frozen=True, kw_only=True):
    """The script asks not to be judged for a while."""

    round: int
    rank: int
    reason: str = ""
    for_s: float | None = None


class Resumed(WireLine, frozen=True, kw_only=True):
    """It may be judged again."""

    round: int
    rank: int
    step: int


class StopSeen(WireLine, frozen=True, kw_only=True, tag="stopping"):
    """The script has seen that it should stop, after this step."""

    round: int
    rank: int
    step: int


class Requested(WireLine, frozen=True, kw_only=True):
    """The script asks for something that others decide about."""

    round: int
    rank: int
    kind: Literal["exclude", "stop"]
    """That this node be excluded from the next round; that the job be stopped."""
    reason: str = ""


class Injected(WireLine, frozen=True, kw_only=True):
    """The script makes a fault on purpose, now."""

    round: int
    rank: int
    fault: str
    lasts_s: float | None = None
    target: str = ""


class Checkpointed(WireLine, frozen=True, kw_only=True):
    """Something became of a checkpoint."""

    round: int
    rank: int
    event: str
    """As `save_started`, `committed` or `image`; an agent passes over what it does not know."""
    body: dict[str, Any]
    """The fields of the fact that it is, without what the agent knows by itself."""


SessionMessage = Paused | Resumed | StopSeen | Requested | Injected | Checkpointed
"""What a script says by its session."""


class Deferred(WireLine, frozen=True, kw_only=True):
    """A signal came that would have ended the rank."""

    round: int
    rank: int
    number: int


Datagram = Up | Stepped | ScriptFinished | Deferred | SessionMessage

# From the agent to its warden.


class RankCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank runs."""

    kind: Literal["script", "module", "program"]
    """A file for Python, what follows `python -m`, or any program."""
    target: str
    arguments: tuple[str, ...] = ()


class WardenPlan(WireLine, frozen=True, kw_only=True):
    """The first line: what stays the same for all rounds."""

    command: RankCommand
    cwd: str
    python: str
    """The interpreter of the ranks."""
    environ: dict[str, str]
    """Packed; what the forge starts with."""
    folder: str
    """Where the forge keeps its output."""
    warm: bool
    preload: tuple[str, ...] | Literal["auto"]
    own: tuple[str, ...] = ()
    """Variables that each rank has for itself, or each round."""
    token: str = ""
    """Who says this to its door is answered."""


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank to start."""

    rank: int
    environ: dict[str, str]
    """Packed and complete: the rank has this and nothing more."""
    stdout: str
    stderr: str


class WardenStart(WireLine, frozen=True, kw_only=True, tag="start"):
    """Start these ranks, forked from the forge if `warm` and it is fit."""

    round: int
    ranks: tuple[RankEntry, ...]
    warm: bool
    forge_within_s: float
    """How long they wait for a forge that is still importing."""


class Signal(WireLine, frozen=True, kw_only=True):
    """Send a signal to ranks, not to what they started; to all of them if `ranks` is None."""

    number: int
    ranks: tuple[int, ...] | None = None
    to_handlers: bool = False
    """Only to ranks that have a handler for it."""


class Undefer(WireLine, frozen=True, kw_only=True):
    """A rank has deferred this signal: end the rank by it, unless the warden has got it, too."""

    rank: int
    number: int


class WardenStop(WireLine, frozen=True, kw_only=True, tag="stop"):
    """Stop every rank and whatever they started."""

    grace_s: float
    kill_within_s: float
    is_done: bool = False
    """All ranks have exited with 0: what they leave has a moment to end by itself."""
    leaves: bool = False
    """And what does not may live on."""


FromAgent = WardenPlan | WardenStart | Signal | Undefer | WardenStop

# From the warden to its agent.


class Spawned(WireLine, frozen=True, kw_only=True):
    """A rank's process exists."""

    round: int
    rank: int
    pid: int
    start: Literal["warm", "cold"]


class Gone(WireLine, frozen=True, kw_only=True):
    """A rank's process has ended."""

    round: int
    rank: int
    pid: int
    code: int | None
    signal: int | None
    core_dumped: bool
    lasted_s: float
    told: bool = False
    """It may have ended because it was told to."""


class Signalled(WireLine, frozen=True, kw_only=True):
    """A signal was sent."""

    unhandled: tuple[int, ...]
    """The ranks that have no handler for it, and did not get it."""


class AllStopped(WireLine, frozen=True, kw_only=True):
    """Nothing of the round is left, but for `left`."""

    ranks: tuple[int, ...]
    """Those that had not ended before."""
    killed: tuple[int, ...]
    """Those of them that outlived the grace."""
    swept: int
    """Other processes that the ranks had left behind."""
    left: tuple[int, ...]
    """Process ids that outlive even SIGKILL."""
    stop_s: float
    outlived: tuple[str, ...] = ()
    """What was still there though all ranks had exited with 0: process id and command."""


class StartFailed(WireLine, frozen=True, kw_only=True):
    """The node could not make a process."""

    round: int
    reason: str


class ForgeUp(WireLine, frozen=True, kw_only=True):
    """The forge can fork warm ranks."""

    took_s: float
    preloaded: tuple[str, ...]
    failed: tuple[str, ...] = ()
    """Asked for, but could not be imported; each with the reason."""
    left_out: tuple[str, ...] = ()
    """Why something is imported by each rank for itself."""


class ForgeDown(WireLine, frozen=True, kw_only=True):
    """The forge cannot fork: ranks start cold."""

    reason: str
    final: bool
    """It is not tried again."""


FromWarden = Spawned | Gone | Signalled | AllStopped | StartFailed | ForgeUp | ForgeDown

# Between the warden and the forge.


class ForgePlan(WireLine, frozen=True, kw_only=True):
    """The first line to a forge."""

    warden: int
    """The process that its ranks will belong to."""
    command: RankCommand
    cwd: str
    preload: tuple[str, ...] | Literal["auto"]
    without: tuple[str, ...] = ()
    """Modules that made an earlier forge unfit."""
    besides: tuple[str, ...] = ()
    """What those had imported, and is fit itself."""
    own: tuple[str, ...] = ()
    """Variables that each rank has for itself, or each round."""


class Fork(WireLine, frozen=True, kw_only=True):
    """Fork these ranks."""

    round: int
    ranks: tuple[RankEntry, ...]


class Forked(WireLine, frozen=True, kw_only=True):
    """They exist: process ids in the order of the request."""

    pids: tuple[int, ...]


class Unfit(WireLine, frozen=True, kw_only=True):
    """It is not safe to fork here."""

    reason: str
    module: str = ""
    """Whose import made it so, where that is known."""
    without: tuple[str, ...] = ()
    """All that have to be left to the ranks, if it is more than that one."""
    besides: tuple[str, ...] = ()
    """What they have imported, and is fit itself."""


ToForge = ForgePlan | Fork
FromForge = ForgeUp | Forked | Unfit

L = TypeVar("L")

_RECEIVE_BYTES = 1 << 18


class Channel(Generic[L]):
    """Lines over a stream socket, for processes without an event loop."""

    def __init__(self, wire: socket.socket, expected: Any) -> None:
        self._wire = wire
        self._decoder = msgspec.json.Decoder(expected)
        self._rest = b""
        self._early: list[L] = []

    def fileno(self) -> int:
        """For selectors."""
        return self._wire.fileno()

    def send(self, line: WireLine) -> None:
        """Send a whole line; OSError when the other side is gone or takes nothing."""
        self._wire.sendall(encode(line))

    def receive(self) -> list[L]:
        """What one read brings, waiting for it; EOFError when the other side is gone."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            octets = self._wire.recv(_RECEIVE_BYTES)
        except ConnectionError:
            octets = b""
        if not octets:
            raise EOFError
        *lines, self._rest = (self._rest + octets).split(b"\n")
        return [self._decoder.decode(line) for line in lines]

    def receive_first(self) -> L:
        """The first line, waiting for it; what came with it is kept in `early`."""
        while True:
            lines = self.receive()
            if lines:
                self._early = lines[1:]
                return lines[0]

    @property
    def early(self) -> bool:
        """Whether lines were read already that a selector cannot know of."""
        return bool(self._early)

    def close(self) -> None:
        """Close the socket."""
        self._wire.close()


def encode(line: WireLine) -> bytes:
    """One line, with its end."""
    return msgspec.json.encode(line) + b"\n"


def pack(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment as JSON can carry it, whatever bytes it holds."""
    return {_latin(name): _latin(value) for name, value in environ.items()}


def unpack(packed: Mapping[str, str]) -> dict[str, str]:
    """The environment that was packed, byte for byte."""
    return {_native(name): _native(value) for name, value in packed.items()}


def _latin(text: str) -> str:
    return os.fsencode(text).decode("latin-1")


def _native(text: str) -> str:
    return os.fsdecode(text.encode("latin-1"))
