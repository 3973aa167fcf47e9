"""The messages between a node's processes (agent, warden, forge, ranks): one line of JSON each."""

import os
import socket
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec


class WireLine(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower, omit_defaults=True):
    """The base of all messages; the field `type` has the name."""


# From a rank to its agent, one datagram each. A rank writes the JSON by hand: see
# bootstrap/agent_link.py. Any process of the job may send it: numbers have the bounds of facts.

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
_Code = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**32)]
_Seconds = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]


class Up(WireLine, frozen=True, kw_only=True):
    """A rank is about to run the user's script."""

    round: _Count
    rank: _Count
    pid: _Count


class Stepped(WireLine, frozen=True, kw_only=True):
    """A rank has finished its first step of the round."""

    round: _Count
    rank: _Count
    step: _Count


class ScriptFinished(WireLine, frozen=True, kw_only=True, tag="ended"):
    """The script has ended; its process has not exited yet."""

    round: _Count
    rank: _Count
    code: _Code
    """The exit code of the process, as far as the script decides it."""
    error: bool = False
    """`error.json` has the exception."""


class Paused(WireLine, frozen=True, kw_only=True):
    """The script asks the agent not to judge the rank for a while."""

    round: _Count
    rank: _Count
    reason: str = ""
    for_s: _Seconds | None = None


class Resumed(WireLine, frozen=True, kw_only=True):
    """The agent may judge the rank again."""

    round: _Count
    rank: _Count
    step: _Count


class StopSeen(WireLine, frozen=True, kw_only=True, tag="stopping"):
    """The script has seen, after this step, that it should stop."""

    round: _Count
    rank: _Count
    step: _Count


class Requested(WireLine, frozen=True, kw_only=True):
    """The script makes a request, which the control plane decides."""

    round: _Count
    rank: _Count
    kind: Literal["exclude", "restart", "stop"]
    """Exclude this node from the next round; end the round, and form another; stop the job."""
    reason: str = ""
    origin: Literal["script", "numerics"] = "script"
    """Who asks: the script itself, or `run.numerics` about a result that cannot be right."""


class Injected(WireLine, frozen=True, kw_only=True):
    """The script injects a fault now."""

    round: _Count
    rank: _Count
    fault: str
    lasts_s: _Seconds | None = None
    target: str = ""


class Checkpointed(WireLine, frozen=True, kw_only=True):
    """An event of a checkpoint."""

    round: _Count
    rank: _Count
    event: str
    """Such as `save_started`, `committed` or `image`; an agent ignores events it does not know."""
    body: dict[str, Any]
    """The fields of the event's fact, without those that the agent adds."""


class NumericsReported(WireLine, frozen=True, kw_only=True, tag="numerics"):
    """An event about a result that cannot be right; rank 0 sends it for all ranks."""

    round: _Count
    rank: _Count
    event: str
    """`suspected`, `judged`, `acted` or `counted`; an agent ignores events it does not know."""
    body: dict[str, Any]
    """The fields of the event's fact, without those that the agent adds."""


class Hung(WireLine, frozen=True, kw_only=True):
    """The rank stands still, and the monitor of its in-process restart ends it now."""

    round: _Count
    rank: _Count
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=1e10)]
    """The wrapper's `hard_timeout`, which has passed without progress."""
    is_over: bool = False
    """The rank has left its function after all, and the monitor lets it restart."""


class Restarted(WireLine, frozen=True, kw_only=True):
    """All ranks have restarted in their processes because of this rank."""

    round: _Count
    rank: _Count
    reason: str
    """What the rank did."""
    error_name: str = ""
    """The class of the exception that it raised; empty for none."""
    waited_s: _Seconds
    """How long it had made no progress; 0 if it raised an exception."""
    took_s: _Seconds
    """The time from there until all ranks had met again."""
    is_without: bool = False
    """Ranks are gone, and the others go on without them; this rank is one of those that go on."""
    lost: tuple[_Count, ...] = ()
    """The ranks that are gone."""


class RankHealed(WireLine, frozen=True, kw_only=True, tag="healed"):
    """The rank has its state in a round into which ranks have gone on with theirs.

    A rank that has kept its own state sends none, but for rank 0, which tells about all ranks.
    """

    round: _Count
    rank: _Count
    origin: Literal["own", "rank", "image", "fresh"]
    """Where its state comes from: its own memory, another rank, a saved image, or nowhere."""
    took_s: _Seconds
    """From the group of the round until all ranks had their states."""
    step: _Count | None = None
    """The step on which all have agreed; None for none."""
    donor: _Count | None = None
    """The other rank."""
    size_bytes: _Count = 0
    """What the rank has received."""
    kept: _Count = 0
    """From rank 0, like all below: how many ranks go on with the state in their memory."""
    taken: _Count = 0
    """How many processes went on, and took their state from others."""
    replaced: _Count = 0
    """How many ranks have another process."""
    replaced_ranks: tuple[_Count, ...] = ()
    """The first 100 of them."""
    reason: str = ""
    """Why this step and these origins."""


SessionMessage = (
    Paused
    | Resumed
    | StopSeen
    | Requested
    | Injected
    | Checkpointed
    | NumericsReported
    | Hung
    | Restarted
    | RankHealed
)
"""The messages of a script's session."""


class Deferred(WireLine, frozen=True, kw_only=True):
    """The rank has deferred a signal that would have ended it."""

    round: _Count
    rank: _Count
    number: Annotated[int, msgspec.Meta(ge=1, le=64)]


Datagram = Up | Stepped | ScriptFinished | Deferred | SessionMessage

# From the agent to its warden.


class RankCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The command that each rank runs."""

    kind: Literal["script", "module", "program"]
    """A Python file, a module for `python -m`, or any program."""
    target: str
    arguments: tuple[str, ...] = ()


class WardenPlan(WireLine, frozen=True, kw_only=True):
    """The first line to a warden: the parts that are the same for all rounds."""

    command: RankCommand
    cwd: str
    python: str
    """The interpreter of the ranks."""
    environ: dict[str, str]
    """The environment of the forge, packed."""
    folder: str
    """The folder of the forge's output."""
    warm: bool
    preload: tuple[str, ...] | Literal["auto"]
    own: tuple[str, ...] = ()
    """The variables whose values differ between ranks or rounds."""
    token: str = ""
    """The warden's socket answers peers that send this token."""


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A rank to start."""

    rank: int
    environ: dict[str, str]
    """The complete environment of the rank, packed."""
    stdout: str
    stderr: str


class WardenStart(WireLine, frozen=True, kw_only=True, tag="start"):
    """Start these ranks; if `warm`, fork them from the forge, if that is possible."""

    round: int
    ranks: tuple[RankEntry, ...]
    warm: bool
    forge_within_s: float
    """How long to wait for a forge that is still importing, and at most for it to fork."""


class Signal(WireLine, frozen=True, kw_only=True):
    """Send a signal to ranks, not to their child processes; to all ranks if `ranks` is None."""

    number: int
    ranks: tuple[int, ...] | None = None
    to_handlers: bool = False
    """Send it only to ranks that have a handler for it."""


class Undefer(WireLine, frozen=True, kw_only=True):
    """End the rank by a signal that it has deferred, unless the warden got the signal, too."""

    rank: int
    number: int


class SaveTogether(WireLine, frozen=True, kw_only=True, tag="save_together"):
    """No round may follow: save the state with the other parked ranks, and answer `Parked`."""

    rank: int
    """The number of the rank among those that save."""
    world_size: int
    """How many save."""
    master_address: str
    master_port: int
    within_s: float
    """A rank that has not answered by then is stopped."""


class WardenStop(WireLine, frozen=True, kw_only=True, tag="stop"):
    """Stop all ranks and the processes that they have started."""

    grace_s: float
    kill_within_s: float
    is_done: bool = False
    """All ranks have exited with 0: processes that they leave get a moment to end themselves."""
    leaves: bool = False
    """Processes that are left after that may live on."""
    keeps: tuple[int, ...] = ()
    """These ranks are parked, instead of stopped, if they survive rounds."""
    is_planned: bool = False
    """As in `Park`."""
    save: SaveTogether | None = None
    """The ranks that are parked save, the first of them under this number."""


FromAgent = WardenPlan | WardenStart | Signal | Undefer | WardenStop

# From the warden to its agent.


class Spawned(WireLine, frozen=True, kw_only=True):
    """A rank's process has started."""

    round: int
    rank: int
    pid: int
    start: Literal["warm", "cold", "kept"]
    """Forked from the forge, started anew, or parked since an earlier round."""


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
    """The process may have ended because the agent has stopped it."""


class Signalled(WireLine, frozen=True, kw_only=True):
    """A signal was sent."""

    unhandled: tuple[int, ...]
    """The ranks without a handler for it, which did not get it."""


class AllStopped(WireLine, frozen=True, kw_only=True):
    """No process of the round is left, except `left` and those of ranks that are `kept`."""

    ranks: tuple[int, ...]
    """The ranks that had not ended before."""
    killed: tuple[int, ...]
    """The ranks that outlived the grace period."""
    swept: int
    """The number of other processes that the ranks had left behind."""
    left: tuple[int, ...]
    """The ids of processes that have survived SIGKILL."""
    stop_s: float
    outlived: tuple[str, ...] = ()
    """Processes that were left after all ranks had exited with 0: process id and command."""
    kept: tuple[int, ...] = ()
    """The ranks that are parked; they are not among `ranks`."""


class StartFailed(WireLine, frozen=True, kw_only=True):
    """The node could not start a process."""

    round: int
    reason: str


class ForgeUp(WireLine, frozen=True, kw_only=True):
    """The forge can fork warm ranks."""

    took_s: float
    preloaded: tuple[str, ...]
    failed: tuple[str, ...] = ()
    """Modules that could not be imported, each with the reason."""
    left_out: tuple[str, ...] = ()
    """Reasons why ranks import some modules themselves."""


class ForgeDown(WireLine, frozen=True, kw_only=True):
    """The forge cannot fork: ranks start cold."""

    reason: str
    final: bool
    """The warden does not start another forge."""


FromWarden = Spawned | Gone | Signalled | AllStopped | StartFailed | ForgeUp | ForgeDown

# Between the warden and a rank that survives a round: see EVERSTEP_SURVIVE in layout.py.


class Survives(WireLine, frozen=True, kw_only=True):
    """The first line of a rank: from now on it can be parked."""

    park_within_s: Annotated[float, msgspec.Meta(gt=0, le=600)]
    """A rank that has not answered `Park` within this time is stopped."""


class Parked(WireLine, frozen=True, kw_only=True):
    """The rank has left its groups, and waits with its objects in memory."""

    step: _Count | None = None
    """The last step that the rank has finished; None before the first."""
    is_torn: bool = False
    """The optimizer was at work: the rank needs the state of another."""


FromSurvivor = Survives | Parked


class Park(WireLine, frozen=True, kw_only=True):
    """The round is over: leave the groups, keep the objects, and answer `Parked`."""

    round: int
    is_planned: bool = False
    """Nothing has failed: the rank may finish its step."""


class GoOn(WireLine, frozen=True, kw_only=True, tag="go_on"):
    """Continue in this round: the answer to `Parked`."""

    round: int
    rank: int
    """The number of the rank in this round, which may have changed."""
    environ: dict[str, str]
    """The complete environment of the rank, packed."""
    stdout: str
    stderr: str


ToSurvivor = Park | GoOn | SaveTogether

# Between the warden and the forge.


class ForgePlan(WireLine, frozen=True, kw_only=True):
    """The first line to a forge."""

    warden: int
    """The warden's process, which will be the parent of the ranks."""
    command: RankCommand
    cwd: str
    preload: tuple[str, ...] | Literal["auto"]
    without: tuple[str, ...] = ()
    """Modules that made an earlier forge unfit."""
    besides: tuple[str, ...] = ()
    """Modules that those had imported, and that are safe to import."""
    own: tuple[str, ...] = ()
    """The variables whose values differ between ranks or rounds."""


class Fork(WireLine, frozen=True, kw_only=True):
    """Fork these ranks."""

    round: int
    ranks: tuple[RankEntry, ...]


class Forked(WireLine, frozen=True, kw_only=True):
    """The ranks were forked: process ids in the order of the request."""

    pids: tuple[int, ...]


class Unfit(WireLine, frozen=True, kw_only=True):
    """The forge cannot fork safely."""

    reason: str
    module: str = ""
    """The module whose import is the reason, if known."""
    without: tuple[str, ...] = ()
    """All modules that must be left to the ranks, if there are several."""
    besides: tuple[str, ...] = ()
    """Modules that they have imported, and that are safe to import."""


ToForge = ForgePlan | Fork
FromForge = ForgeUp | Forked | Unfit

L = TypeVar("L")

_RECEIVE_BYTES = 1 << 18


class Channel(Generic[L]):
    """Lines over a stream socket, for processes without an event loop."""

    def __init__(self, wire: socket.socket, expected: Any, *, longest: int = 1 << 30) -> None:
        self._wire = wire
        self._longest = longest
        self._decoder = msgspec.json.Decoder(expected)
        self._rest = b""
        self._early: list[L] = []

    def fileno(self) -> int:
        """The descriptor of the socket, for selectors."""
        return self._wire.fileno()

    def send(self, line: WireLine) -> None:
        """Send a whole line; OSError if the peer is gone or does not read."""
        self._wire.sendall(encode(line))

    def receive(self) -> list[L]:
        """Wait for the next read, and return its lines; EOFError if the peer is gone.

        A peer that sends a line without end counts as gone.
        """
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
        if len(self._rest) > self._longest:
            raise EOFError
        return [self._decoder.decode(line) for line in lines]

    def receive_first(self) -> L:
        """Wait for the first line, and return it; lines after it are kept for `receive`."""
        while True:
            lines = self.receive()
            if lines:
                self._early = lines[1:]
                return lines[0]

    @property
    def early(self) -> bool:
        """Whether lines were read that `receive` has not returned; a selector cannot see them."""
        return bool(self._early)

    def close(self) -> None:
        """Close the socket."""
        self._wire.close()


def encode(line: WireLine) -> bytes:
    """The message as a line, with its end."""
    return msgspec.json.encode(line) + b"\n"


def pack(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment as texts that JSON can carry, whatever bytes it has."""
    return {_latin(name): _latin(value) for name, value in environ.items()}


def unpack(packed: Mapping[str, str]) -> dict[str, str]:
    """The environment that was packed, byte for byte."""
    return {_native(name): _native(value) for name, value in packed.items()}


def _latin(text: str) -> str:
    return os.fsencode(text).decode("latin-1")


def _native(text: str) -> str:
    return os.fsdecode(text.encode("latin-1"))
