"""Ranks that survive rounds: the warden parks them, and lets them go on in the next round.

A rank that wants this connects to the socket of its warden. No other rank costs anything.
"""

import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Collection, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from everstep_services.agent.ranks import process_tree
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import ShortPath
from trainer_sdk.wire import (
    Channel,
    FromSurvivor,
    GoOn,
    Park,
    Parked,
    SaveTogether,
    Survives,
    ToSurvivor,
)

SURVIVE_SOCKET = "survive.sock"
_SEND_WITHIN_S = 1.0
"""A rank that reads nothing must not stop its warden."""
_LONGEST_LINE = 1 << 12
_AT_ONCE = 64
_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True)
class _Survivor:
    channel: Channel[FromSurvivor]
    park_within_s: float = 0.0
    """0 until the rank has promised a time."""
    park_by: float | None = None
    """When it must be parked, from the order to park until it goes on."""
    is_parked: bool = False
    folders: set[str] = field(default_factory=set)
    """Its folders of all rounds: processes that it has started name one of them."""


class Survivors:
    """The connections of ranks that survive rounds, by process id."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener
        self._survivors: dict[int, _Survivor] = {}
        self._lost: list[int] = []
        """Processes that were asked to park, or were parked, and have hung up."""

    @property
    def sources(self) -> Iterable[socket.socket | Channel[FromSurvivor]]:
        """What may become readable."""
        if self._listener is not None:
            yield self._listener
        for survivor in self._survivors.values():
            yield survivor.channel

    @property
    def parking(self) -> Collection[int]:
        """The processes that were asked to park, and have not answered yet."""
        survivors = self._survivors.items()
        return {pid for pid, it in survivors if it.park_by is not None and not it.is_parked}

    @property
    def parked(self) -> Collection[int]:
        """The processes that wait for the next round."""
        return {pid for pid, survivor in self._survivors.items() if survivor.is_parked}

    @property
    def next_at(self) -> float | None:
        """When to call `overdue` next, even if no rank answers."""
        moments = (self._survivors[pid].park_by for pid in self.parking)
        return min((at for at in moments if at is not None), default=None)

    def hear(self, ready: Container[int], is_rank: Callable[[int], bool]) -> None:
        """Accept the connections of ranks, and read their lines."""
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept(self._listener, is_rank)
        for pid, survivor in list(self._survivors.items()):
            if survivor.channel.fileno() in ready and not _hears(survivor):
                self._lose(pid)

    def settle(self, is_rank: Callable[[int], bool]) -> None:
        """Hear all that ranks have sent until now."""
        while ready := {source.fileno() for source in select.select([*self.sources], [], [], 0)[0]}:
            self.hear(ready, is_rank)

    def park(self, pid: int, line: Park, folder: str, now: float) -> bool:
        """Ask a rank to park; False if it does not survive rounds."""
        survivor = self._survivors.get(pid)
        if survivor is None or not survivor.park_within_s:
            return False
        if survivor.park_by is not None:
            return True
        survivor.folders.add(folder)
        survivor.park_by = now + survivor.park_within_s
        return self._send(pid, survivor, line)

    def save(self, pid: int, line: SaveTogether, now: float) -> None:
        """Have a parked rank save its state, after which it is parked again."""
        survivor = self._survivors[pid]
        survivor.is_parked, survivor.park_by = False, now + line.within_s
        self._send(pid, survivor, line)

    def go_on(self, pid: int, line: GoOn) -> bool:
        """Let a parked rank go on; False if it does not listen any more."""
        survivor = self._survivors[pid]
        survivor.park_by, survivor.is_parked = None, False
        return self._send(pid, survivor, line)

    def overdue(self, now: float) -> list[int]:
        """The processes that have not parked in time, or have hung up since: end them."""
        late = [pid for pid in self.parking if now >= (self._survivors[pid].park_by or now)]
        for pid in late:
            self.forget(pid)
        lost, self._lost = self._lost, []
        return late + lost

    def forget(self, pid: int) -> None:
        """A process is gone, or is being ended."""
        survivor = self._survivors.pop(pid, None)
        if survivor is not None:
            survivor.channel.close()
        if pid in self._lost:
            self._lost.remove(pid)

    def others(self, spared: Collection[int]) -> dict[int, int]:
        """The processes below the warden that are nobody's any more, with their parents.

        A survivor's are those below it, and those that lost their parent and are of its session or
        name its folder. No process below the `spared` counts.
        """
        left = process_tree.descendants(os.getpid(), spared=spared)
        return {pid: parent for pid, parent in left.items() if not self._owns(pid)}

    def _owns(self, pid: int) -> bool:
        if not self._survivors:
            return False
        folder = process_tree.environ(pid).get(layout.FOLDER_VARIABLE)
        return process_tree.session(pid) in self._survivors or any(
            folder in survivor.folders for survivor in self._survivors.values()
        )

    def _accept(self, listener: socket.socket, is_rank: Callable[[int], bool]) -> None:
        for _ in range(_AT_ONCE):
            try:
                wire, _ = listener.accept()
            except OSError:  # nobody else waits, or no descriptor is left
                return
            credentials = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid = _CREDENTIALS.unpack(credentials)[0]
            if not is_rank(pid):
                wire.close()
                continue
            self.forget(pid)  # a second call in one process
            wire.settimeout(_SEND_WITHIN_S)
            self._survivors[pid] = _Survivor(Channel(wire, FromSurvivor, longest=_LONGEST_LINE))

    def _send(self, pid: int, survivor: _Survivor, line: ToSurvivor) -> bool:
        try:
            survivor.channel.send(line)
        except OSError:
            self.forget(pid)
            return False
        return True

    def _lose(self, pid: int) -> None:
        was_asked = self._survivors[pid].park_by is not None
        self.forget(pid)
        if was_asked:
            self._lost.append(pid)


def _hears(survivor: _Survivor) -> bool:
    """Take the lines of a rank; False if it has hung up, or has sent what it must not send."""
    try:
        lines = survivor.channel.receive()
    except (EOFError, OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return False
    return all(_takes(survivor, line) for line in lines)


def _takes(survivor: _Survivor, line: FromSurvivor) -> bool:
    match line:
        case Survives() if not survivor.park_within_s:
            survivor.park_within_s = line.park_within_s
        case Parked() if survivor.park_by is not None and not survivor.is_parked:
            survivor.is_parked = True
        case _:
            return False
    return True


def listening(folder: str) -> Survivors:
    """Listen for ranks in the agent's folder; if that fails, no rank survives a round."""
    path = os.path.join(folder, SURVIVE_SOCKET)
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with ShortPath(path) as short:
            listener.bind(short)
        os.chmod(path, 0o600)
        listener.listen(_AT_ONCE)
    except OSError as error:
        sys.stderr.write(f"no rank survives a round: {path}: {error}\n")
        listener.close()
        return Survivors()
    listener.setblocking(False)  # noqa: FBT003 - positional only
    return Survivors(listener)
